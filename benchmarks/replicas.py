"""Training in a closed loop with the real core in virtual time: the experiment, not its figures.

Each rank has a replica, computes its gradient from it when it enters an op, and steps by what the op gave it.
late_training.py prints what lateness does to that; tests/test_late_training.py holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tailcut import Scenario, _native
from tailcut.epsilon import Epsilon
from tailcut.mirror import LinkStage, Stage
from tailcut.policy.deadline import fixed_bounds, to_native
from tailcut.report import Report
from tailcut.simulation import Hang
from tailcut.simulation.run import spec_of
from tailcut.stats import OpBounds

Floats = npt.NDArray[np.float32]

DRIFT_EVERY = 10
"""Steps from one look at the drift to the next."""
LOSS_EVERY = 5
WINDOW = 25
"""Steps whose results are compared together with what they would have been."""


@dataclass(frozen=True)
class Digits:
    """A network of one hidden layer on scikit-learn's digits; without hidden units, softmax regression."""

    hidden: int = 32
    batch: int = 4
    """Examples of a rank in a step."""

    @property
    def length(self) -> int:
        return sum(rows * columns + columns for rows, columns in self._shapes)

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        return [(64, self.hidden), (self.hidden, 10)] if self.hidden else [(64, 10)]

    def start(self, seed: int) -> Floats:
        """Weights as He et al. draw them, biases 0."""
        rng = np.random.default_rng((seed, 1))
        layers = [
            np.append(rng.normal(0, np.sqrt(2 / rows), rows * columns), np.zeros(columns))
            for rows, columns in self._shapes
        ]
        return np.concatenate(layers).astype(np.float32)

    def layers(self, theta: Floats) -> list[tuple[Floats, Floats]]:
        parts, at = [], 0
        for rows, columns in self._shapes:
            end = at + rows * columns
            parts.append((theta[at:end].reshape(rows, columns), theta[end : end + columns]))
            at = end + columns
        return parts

    def gradient(self, theta: Floats, chosen: npt.NDArray[np.int64]) -> Floats:
        """Of the mean loss over a batch."""
        images, labels, _, _ = digits()
        activations = [images[chosen]]
        *hidden, (weights, bias) = layers = self.layers(theta)
        for inner, shift in hidden:
            activations.append(np.maximum(activations[-1] @ inner + shift, 0))
        error = _softmax(activations[-1] @ weights + bias)
        error[np.arange(self.batch), labels[chosen]] -= 1
        error /= self.batch
        parts: list[Floats] = []
        for (inner, _), inputs in zip(reversed(layers), reversed(activations), strict=True):
            parts = [(inputs.T @ error).ravel(), error.sum(0), *parts]
            error = (error @ inner.T) * (inputs > 0)
        return np.concatenate(parts)

    def _outputs(self, theta: Floats, images: Floats) -> Floats:
        *hidden, (weights, bias) = self.layers(theta)
        for inner, shift in hidden:
            images = np.maximum(images @ inner + shift, 0)
        return _softmax(images @ weights + bias)

    def loss(self, theta: Floats) -> float:
        """The mean over all training images."""
        images, labels, _, _ = digits()
        right = self._outputs(theta, images)[np.arange(len(labels)), labels]
        return float(-np.log(np.maximum(right, 1e-12)).mean())

    def accuracy(self, theta: Floats) -> float:
        _, _, images, labels = digits()
        return float((self._outputs(theta, images).argmax(1) == labels).mean())


DIGITS = Digits()


def _softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True), np.float32)


@cache
def digits() -> tuple[Floats, npt.NDArray[np.int64], Floats, npt.NDArray[np.int64]]:
    """Images and labels to train with, and to test with (one in five)."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    images = ((images - images.mean()) / images.std()).astype(np.float32)
    test = np.arange(len(labels)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


class Momentum:
    """SGD with momentum."""

    BETA = 0.9

    def __init__(self, length: int) -> None:
        self._velocity = np.zeros(length, np.float32)

    def change(self, gradient: Floats, lr: float) -> Floats:
        self._velocity *= self.BETA
        self._velocity += gradient
        return np.asarray(lr * self._velocity, np.float32)


class Adam:
    """With the usual constants."""

    BETAS = 0.9, 0.999
    LEAST = 1e-8

    def __init__(self, length: int) -> None:
        self._moments = np.zeros((2, length), np.float32)
        self._steps = 0

    def change(self, gradient: Floats, lr: float) -> Floats:
        self._steps += 1
        for moment, beta, power in zip(self._moments, self.BETAS, (gradient, gradient**2), strict=True):
            moment += (1 - beta) * (power - moment)
        first, second = (
            moment / (1 - beta**self._steps) for moment, beta in zip(self._moments, self.BETAS, strict=True)
        )
        return np.asarray(lr * first / (np.sqrt(second) + self.LEAST), np.float32)


@dataclass(frozen=True)
class Training:
    """What is trained, and how its ops go. ``scenario`` has its ranks, ops and seed."""

    scenario: Scenario
    bounds: OpBounds
    task: Digits = DIGITS
    lr: float = 0.03
    optimizer: type[Momentum] | type[Adam] = Momentum
    clean_from: int | None = None
    """The step from which on nothing is late, because the bounds are long."""

    def run(self, record: bool = False) -> Outcome:
        """``record`` also finds out how late what is late was."""
        return _Run(replace(self, scenario=replace(self.scenario, record=record))).outcome()


# ---- how what is late gets late ----------------------------------------------------------------------------

OP_S = 1e-3
"""About what an op takes that somebody is late for. The network has no other time: everything is relative to
it."""
RANKS = 8
STEPS = 250

ONE_OP_LATE_S = {
    "raw": {0.0: 5e-3, 0.15: 0.75e-3, 0.4: 0.49e-3, 0.7: 0.2e-3},
    "planes": {0.0: 5e-3, 0.15: 0.63e-3, 0.4: 0.4e-3, 0.7: 0.18e-3},
}
"""By the share that is to be late: the bound of SCATTER where packets take up to OP_S."""
FREE_S = {0.15: 13e-3, 0.4: 6e-3, 0.7: 1.7e-3}
"""By the share that is to be late: the mean time from one hang of up to eight ops to the next."""


ONE_IN_TWENTY_S = {4: 0.72e-3, 8: 0.77e-3, 64: 0.83e-3}
"""By the number of ranks: the bound of GATHER that one in twenty of the means misses."""


def one_op_late(
    share: float, *, seed: int, late: str = "carry", codec: str = "raw", planes: int = 16
) -> Training:
    """Packets take any time up to an op, and SCATTER closes before. GATHER waits for all."""
    bound_s = ONE_OP_LATE_S[codec][share]
    scenario = _scenario(seed, late, codec, planes, jitter_s=OP_S)
    return Training(scenario, OpBounds(bound_s, 2 * bound_s, 1, 1, 1, scenario.deadline_s))


def ops_late(
    share: float, *, seed: int, late: str = "carry", codec: str = "raw", planes: int = 16, most: int = 8
) -> Training:
    """Ranks hang for one to ``most`` ops, on their own, and then do what they have missed. Nobody waits for
    them."""
    rng = np.random.default_rng((seed, 3))
    hangs = []
    free_s = FREE_S[share] * (1 + most) / 9
    for rank in range(RANKS):
        at_s = rng.exponential(free_s)
        while at_s < 2 * STEPS * OP_S:
            until_s = at_s + rng.uniform(1, most) * OP_S
            hangs.append(Hang(rank, at_s, until_s))
            at_s = until_s + rng.exponential(free_s)
    bound_s = 0.9 * OP_S
    compute_s = np.full((STEPS, RANKS), 0.1 * OP_S).tolist()
    scenario = _scenario(seed, late, codec, planes, hangs=hangs, compute_s=compute_s)
    return Training(scenario, OpBounds(bound_s, bound_s, 1, 1, 1, scenario.deadline_s))


def means_late(
    *, seed: int, steps: int = STEPS, ranks: int = RANKS, task: Digits = DIGITS, **options: Any
) -> Training:
    """Packets take any time up to an op. SCATTER waits for all, and ops end before one in twenty of the
    means has come."""
    scenario = Scenario(
        ranks=ranks,
        length=task.length,
        ops=steps,
        seed=seed,
        deadline_s=2.0,
        buckets=1,
        packet_bytes=256,
        jitter_s=OP_S,
        **options,
    )
    return Training(scenario, OpBounds(1.1 * OP_S, 2 * OP_S, ONE_IN_TWENTY_S[ranks], 1, 0.1 * OP_S, 2), task)


def _scenario(seed: int, late: str, codec: str, planes: int, **network: Any) -> Scenario:
    return Scenario(
        ranks=RANKS,
        length=Digits().length,
        ops=STEPS,
        seed=seed,
        deadline_s=2.0,
        buckets=1,
        late=late,
        codec=codec,
        planes=planes,
        packet_bytes=256,
        attendance=False,  # ops take their time, so that what is late is late by so many ops
        **network,
    )


# ---- a run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    losses: list[float] = field(repr=False)
    """Of rank 0 over all training images, every LOSS_EVERY steps from the first on."""
    loss: float
    """The mean of those in the last fifth of the steps."""
    accuracy: float
    """Of rank 0's replica at the end, on the test images."""
    growth: float
    """By how much results are longer than means of all contributions in the worst WINDOW of steps (of their
    mean squares, the root)."""
    drift: list[float] = field(repr=False)
    """Every DRIFT_EVERY steps: the largest distance of a replica from that of rank 0 over the norm of
    that."""
    late_contributions: float
    """The share of other ranks' contributions that an owner reduced without."""
    late_means: float
    """The share of other owners' means that a rank ended its op without."""
    ops_late: list[float] = field(repr=False)
    """Of the late contributions that came: the shares that were 1, 2, ... ops late."""
    counters: list[_native.Counters] = field(repr=False)
    op_s: float
    """The mean time of an op."""
    epsilon: Epsilon
    """The mean over all ops and ranks."""

    def counted(self, name: str) -> int:
        """A counter's sum over all ranks."""
        return sum(getattr(counters, name) for counters in self.counters)


class _Run:
    def __init__(self, training: Training) -> None:
        self.training = training
        scenario, task = training.scenario, training.task
        if scenario.length != task.length or scenario.depth != 1 or scenario.buckets > 1:
            raise ValueError(f"a run needs one bucket of {task.length} coordinates and no ops at once")
        self.means = np.zeros((scenario.ops, task.length), np.float32)
        self.results = np.zeros((scenario.ops, task.length), np.float32)
        self.losses: list[float] = []
        self.drift: list[float] = []
        self.apart: dict[int, list[Floats]] = {}
        # An op ends before the rank enters the next one, so that all share a buffer.
        self.buffers = np.zeros((scenario.ranks, task.length), np.float32)
        self.replicas = [_Replica(self, rank) for rank in range(scenario.ranks)]

    def outcome(self) -> Outcome:
        scenario = self.training.scenario
        result = _native.simulate(spec_of(scenario, self.replicas), [list(self.buffers)] * scenario.ops)
        return Outcome(
            losses=self.losses,
            loss=float(np.mean(self.losses[-(-4 * scenario.ops // (5 * LOSS_EVERY)) :])),
            accuracy=self.training.task.accuracy(self.replicas[0].theta),
            growth=self._growth(),
            drift=self.drift,
            late_contributions=self._late("scatter"),
            late_means=self._late("gather"),
            ops_late=_ops_late(result),
            counters=list(result.counters),
            op_s=float(np.mean([report.elapsed_s for rank in self.replicas for report in rank.reports])),
            epsilon=Epsilon(*np.mean([r.epsilon for rank in self.replicas for r in rank.reports], axis=0)),
        )

    def _late(self, stage: Stage) -> float:
        stages: list[LinkStage] = [
            getattr(link, stage)
            for replica in self.replicas
            for report in replica.reports
            for rank, link in enumerate(report.links)
            if rank != replica.rank
        ]
        return sum(part.missing for part in stages) / sum(part.coords for part in stages)

    def _growth(self) -> float:
        def energy(vectors: Floats) -> npt.NDArray[np.float64]:
            whole = len(vectors) // WINDOW * WINDOW
            squares = np.square(vectors[:whole], dtype=np.float64).sum(1)
            return np.asarray(squares.reshape(-1, WINDOW).mean(1))

        return float(np.sqrt((energy(self.results) / energy(self.means)).max()))

    def note_step(self, step: int, theta: Floats) -> None:
        """A rank has done a step. Those of other ranks may come ops later."""
        if step % DRIFT_EVERY:
            return
        self.apart.setdefault(step, []).append(theta.copy())
        if len(self.apart[step]) == len(self.replicas):
            first, *others = self.apart.pop(step)
            self.drift.append(
                max(float(np.linalg.norm(o - first)) for o in others) / float(np.linalg.norm(first))
            )


class _Replica:
    """The policy of one rank: it computes where a policy would only decide."""

    def __init__(self, run: _Run, rank: int) -> None:
        self.run, self.rank = run, rank
        training = run.training
        self.seed, self.ops = training.scenario.seed, training.scenario.ops
        self.theta = training.task.start(self.seed)
        self.optimizer = training.optimizer(training.task.length)
        shape = (self.ops, training.task.batch)
        self.batches = np.random.default_rng((self.seed, 2, rank)).integers(0, len(digits()[0]), shape)
        self.step = 0
        self.reports: list[Report] = []
        self.bounds = [
            _native.Terms(bounds, training.scenario.planes)
            for bounds in (to_native(training.bounds), fixed_bounds(training.scenario.deadline_s))
        ]

    def terms(self, length: int) -> _native.Terms:
        gradient = self.run.training.task.gradient(self.theta, self.batches[self.step])
        self.run.buffers[self.rank] = gradient
        self.run.means[self.step] += gradient / len(self.run.replicas)
        clean_from = self.run.training.clean_from
        return self.bounds[clean_from is not None and self.step >= clean_from]

    def after(self, report: Report, now_s: float) -> None:
        result = self.run.buffers[self.rank]
        self.theta -= self.optimizer.change(result, self.run.training.lr)
        self.reports.append(report)
        if self.rank == 0:
            self.run.results[self.step] = result
            if self.step % LOSS_EVERY == 0:
                self.run.losses.append(self.run.training.task.loss(self.theta))
        self.run.note_step(self.step, self.theta)
        self.step += 1


def _ops_late(result: _native.SimResult) -> list[float]:
    """By the close of the owner's ops at which a contribution first came; empty without a record."""
    table = result.deliveries()
    table = table[~table["gather"] & ~table["empty"]]
    if not len(table):
        return []
    packets = np.stack([table[name] for name in ("destination", "source", "seq", "first")], 1)
    _, first = np.unique(packets, axis=0, return_index=True)
    table = table[first]
    ages = []
    for rank, reports in enumerate(result.reports):
        closed_ns = [report.entered_at + 1e9 * report.scatter.ended_s for report in reports]
        here = table[table["destination"] == rank]
        ages.append(
            np.searchsorted(np.maximum.accumulate(closed_ns), here["at_ns"]) - here["seq"].astype(int)
        )
    late = np.concatenate(ages)
    late = late[late > 0]
    return [float(share) for share in np.bincount(late)[1:] / max(1, len(late))]
