"""How many rounds of training an error of the averaged gradient costs: the experiment, not its figures.

Logistic regression by SGD, with one vector of weights for each seed. All arms of a run get the same batches.
The error is that of tailcut.codec when planes are left out and packets are lost. tests/test_budget_rounds.py
checks that the cost is 1 + ε; budget_rounds.py prints and draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tailcut import codec
from tailcut.epsilon import unbiased_nmse

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

SEEDS = 256
DIMENSIONS = 256
"""SEEDS * DIMENSIONS is two blocks of the codec: seeds share blocks, see Damage."""
BATCH = 16
LR = 0.04
TARGET = 0.035
"""The excess loss to reach. LR is near the best one for it: LR / 1.2 takes 2 % longer, LR * 1.2 takes 10
%."""
TRUTH = 2.0
"""The norm of the true weights. Labels are noisy: the best possible loss is 0.46, that of zero weights is
0.69."""
TRUE_DIRECTION = np.full(DIMENSIONS, DIMENSIONS**-0.5, np.float32)
"""No coordinate is special, because Adam would treat it differently."""
EVERY = 4
"""Rounds from one point of a curve to the next."""

_NODES = np.linspace(-8, 8, 65)
_WEIGHTS = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()


def _sigmoid(z: Doubles) -> Doubles:
    return 1 / (1 + np.exp(-z))


def _mean_slope(norm: npt.ArrayLike) -> Doubles:
    """E σ'(norm·ξ) for a normal ξ. By Stein's lemma, E σ(x·w) x is this multiple of w."""
    p = _sigmoid(np.asarray(norm, np.float64)[..., None] * _NODES)
    return np.asarray((p * (1 - p)) @ _WEIGHTS)


_TRUTH_SLOPE = float(_mean_slope(TRUTH))


def _loss(norm: npt.ArrayLike, along: npt.ArrayLike) -> Doubles:
    """The exact loss over the population, for weights with this norm and this coordinate along the true
    ones."""
    softplus = np.logaddexp(0, np.asarray(norm, np.float64)[..., None] * _NODES) @ _WEIGHTS
    return np.asarray(softplus - TRUTH * _TRUTH_SLOPE * np.asarray(along))


_LEAST_LOSS = float(_loss(TRUTH, TRUTH))


def excess_loss(weights: Floats) -> Doubles:
    """The population's loss minus the least possible one. The last axis of the weights is the coordinates."""
    return _loss(np.linalg.norm(weights, axis=-1), weights @ TRUE_DIRECTION) - _LEAST_LOSS


def population_gradient(weights: Floats) -> Floats:
    """The gradient without the noise of a batch."""
    norms = np.linalg.norm(weights, axis=-1)
    gradient = _mean_slope(norms)[..., None] * weights - _TRUTH_SLOPE * TRUTH * TRUE_DIRECTION
    return gradient.astype(np.float32)


class Batches:
    """Gradients of batches that were never used before: one batch per seed and round, the same for all
    arms."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, weights: Floats) -> Floats:
        shape = (SEEDS, BATCH, DIMENSIONS)
        x = self._random.standard_normal(shape, dtype=np.float32)
        y = self._random.random(shape[:2]) < _sigmoid(TRUTH * (x @ TRUE_DIRECTION).astype(np.float64))
        p = _sigmoid((weights @ x.transpose(0, 2, 1)).astype(np.float64))
        residual = ((p - y[:, None]) / BATCH).astype(np.float32)
        return np.asarray(residual @ x)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What is left of a gradient that is sent with ``planes`` planes and loses this share of its packets.

    All seeds form one vector. The rotation spreads an error evenly over a block, and so over seeds. Seeds are
    alike, so on average each of them gets the energy that it would get in a block of its own.
    """

    planes: int = 16
    lost: float = 0.0
    biased: bool = False

    @classmethod
    def of_budget(cls, epsilon: float) -> Damage:
        """Uses the fewest planes that fit the budget, and lost packets for the rest of it."""
        planes = next(b for b in range(1, 17) if unbiased_nmse(b) <= epsilon)
        return cls(planes=planes, lost=1 - (1 + unbiased_nmse(planes)) / (1 + epsilon))

    def __call__(self, gradient: Floats, seed: int) -> Floats:
        packets = codec.encode(gradient.ravel(), planes=self.planes, seed=seed, packet_bytes=200)
        arrived = np.random.default_rng([seed, self.planes]).random(len(packets)) >= self.lost
        came = [packet if here else None for packet, here in zip(packets, arrived, strict=True)]
        return codec.decode(came, gradient.size, seed=seed, biased=self.biased).reshape(gradient.shape)


class Optimizer(Protocol):
    def __call__(self, gradient: Floats) -> Floats:
        """The step for a learning rate of 1."""


class Sgd:
    def __call__(self, gradient: Floats) -> Floats:
        return gradient


class Momentum:
    """Momentum of 0.9. A step is the mean of past gradients, so that learning rates compare with those of
    Sgd."""

    def __init__(self) -> None:
        self._mean = np.zeros((), np.float32)

    def __call__(self, gradient: Floats) -> Floats:
        self._mean = _towards(gradient, self._mean, 0.9)
        return self._mean


class Adam:
    """Adam with betas 0.9 and 0.99."""

    def __init__(self) -> None:
        self._rounds = 0
        self._mean = np.zeros((), np.float32)
        self._square = np.zeros((), np.float32)

    def __call__(self, gradient: Floats) -> Floats:
        self._rounds += 1
        self._mean = _towards(gradient, self._mean, 0.9)
        self._square = _towards(np.square(gradient), self._square, 0.99)
        mean = self._mean / np.float32(1 - 0.9**self._rounds)
        square = self._square / np.float32(1 - 0.99**self._rounds)
        return np.asarray(mean / (np.sqrt(square) + np.float32(1e-8)))


def _towards(value: Floats, mean: Floats, beta: float) -> Floats:
    return np.asarray(np.float32(beta) * mean + np.float32(1 - beta) * value, np.float32)


@dataclass(frozen=True, kw_only=True)
class Arm:
    damage: Damage | None = None
    lr: float = LR
    optimizer: Callable[[], Optimizer] = field(default=Sgd)


def budget_arm(epsilon: float) -> Arm:
    """As the design says: an error of ε, and a learning rate that is divided by 1 + ε."""
    return Arm(damage=Damage.of_budget(epsilon), lr=LR / (1 + epsilon))


@dataclass(frozen=True)
class Curves:
    excess: Doubles
    """Excess loss of every arm, after every EVERY rounds, of every seed."""
    epsilon: Doubles
    """By arm: energy of the error over that of the gradient, over all seeds, as the mean over the rounds."""
    seed_epsilon: Doubles
    """The same for each seed by itself, as the mean over seeds and rounds. It is larger because a small
    gradient counts more."""
    signal: Doubles
    """By arm, every EVERY rounds: the share of the population's gradient in the gradient's energy."""

    def rounds(self, target: float = TARGET) -> Doubles:
        """Rounds by arm until the mean over the seeds first reaches the target; inf: never."""
        return crossing(self.excess.mean(axis=-1), target)

    def resampled_rounds(self, target: float = TARGET, samples: int = 400) -> Doubles:
        """The same for bootstrap samples of the seeds, which are the same for all arms: shape (samples,
        arms)."""
        seeds = self.excess.shape[-1]
        counts = np.random.default_rng(0).multinomial(seeds, [1 / seeds] * seeds, samples)
        return crossing(np.einsum("ns,aks->nak", counts / seeds, self.excess, optimize=True), target)


def crossing(curves: Doubles, target: float, every: int = EVERY) -> Doubles:
    """When curves with a point every ``every`` rounds first reach the target; inf: never."""
    below = curves <= target
    after = np.maximum(below.argmax(axis=-1), 1)[..., None]
    high, low = (np.take_along_axis(curves, at, axis=-1)[..., 0] for at in (after - 1, after))
    rounds = every * (after[..., 0] - (target - low) / (high - low))
    return np.where(below.any(axis=-1), rounds, np.inf)


def run(
    arms: Sequence[Arm],
    rounds: int,
    *,
    seed: int = 1,
    gradients: Callable[[Floats], Floats] | None = None,
) -> Curves:
    """Runs all arms from weights of zero, whose shape is (seeds, arms, coordinates). ``gradients`` is like
    Batches."""
    gradients = gradients or Batches(seed)
    weights = np.zeros((SEEDS, len(arms), DIMENSIONS), np.float32)
    optimizers = [arm.optimizer() for arm in arms]
    excess = [excess_loss(weights)]
    error = np.zeros((rounds, SEEDS, len(arms)))
    energy = np.empty((rounds, SEEDS, len(arms)))
    signal = []
    for k in range(rounds):
        exact = gradients(weights)
        energy[k] = np.square(exact).sum(axis=-1)
        if k % EVERY == 0:
            signal.append(np.square(population_gradient(weights)).sum(axis=(0, 2)) / energy[k].sum(axis=0))
        for a, arm in enumerate(arms):
            gradient = exact[:, a]
            if arm.damage is not None:
                gradient = arm.damage(gradient, seed=seed << 32 | k)
                error[k, :, a] = np.square(gradient - exact[:, a]).sum(axis=-1)
            weights[:, a] -= np.float32(arm.lr) * optimizers[a](gradient)
        if (k + 1) % EVERY == 0:
            excess.append(excess_loss(weights))
    return Curves(
        excess=np.array(excess).transpose(2, 0, 1),
        epsilon=(error.sum(axis=1) / energy.sum(axis=1)).mean(axis=0),
        seed_epsilon=(error / energy).mean(axis=(0, 1)),
        signal=np.array(signal).T,
    )


def joined(runs: Sequence[Curves]) -> Curves:
    """Joins runs of the same arms with different seeds."""
    return Curves(
        excess=np.concatenate([one.excess for one in runs], axis=-1),
        epsilon=np.mean([one.epsilon for one in runs], axis=0),
        seed_epsilon=np.mean([one.seed_epsilon for one in runs], axis=0),
        signal=np.mean([one.signal for one in runs], axis=0),
    )
