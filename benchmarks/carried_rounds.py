"""What does it cost to carry what is late, or what coding takes? Rounds to a loss, over what ε would be if it
were lost.

Trains eight replicas in virtual time by the real core, like late_training.py, and gives the shares of
docs/budget.md. The figures do not depend on the machine: they contain no clock. It takes about ten minutes on
a free core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from replicas import LOSS_EVERY, OP_S, Adam, Momentum, Outcome, Training, means_late, one_op_late, ops_late
from rounds import Doubles, crossing

from tailcut.epsilon import CARRIED_CODING, STALE_CONTRIBUTION, STALE_MEAN

OPTIMIZERS: dict[str, tuple[type[Momentum] | type[Adam], tuple[float, ...]]] = {
    "momentum": (Momentum, (0.03, 0.05)),
    "adam": (Adam, (0.003, 0.01)),
}
"""By name, with its learning rates."""
TARGETS = range(60, 161, 10)
"""Rounds after which a run with nothing late has the losses to be reached. Loss curves are noisy, so the
ratio is the mean over these."""
SAMPLES = 400
"""Of a bootstrap."""


def means_a_quarter_late(*, seed: int, late: str = "carry") -> Training:
    training = means_late(seed=seed, late=late)
    return replace(training, bounds=training.bounds._replace(gather_s=0.5 * OP_S))


def coded(planes: int, *, seed: int, late: str = "carry") -> Training:
    """Nothing is late."""
    return one_op_late(0.0, seed=seed, late=late, codec="planes", planes=planes)


KINDS: dict[str, Callable[..., Training]] = {
    "contributions, one op": partial(one_op_late, 0.15),
    "ranks, 1 to 3 ops": partial(ops_late, 0.4, most=3),
    "ranks, 1 to 8 ops": partial(ops_late, 0.4),
    "means, one op": means_a_quarter_late,
    "coding, 3 planes": partial(coded, 3),
    "coding, 2 planes": partial(coded, 2),
    "coding, 1 plane": partial(coded, 1),
}


def lost_epsilon(kind: str, late: str, outcomes: list[Outcome]) -> float:
    """ε if all that is carried were lost."""
    if kind.startswith("coding"):
        share = CARRIED_CODING if late == "carry" else 1.0
        return float(np.mean([run.epsilon.quantized / share for run in outcomes]))
    share = STALE_MEAN if kind.startswith("means") else STALE_CONTRIBUTION
    return float(np.mean([run.epsilon.lost + run.epsilon.late / share for run in outcomes]))


def ratios(outcomes: list[Outcome], clean: list[Outcome]) -> Doubles:
    """Rounds over those of clean runs: of the mean over all seeds, then of bootstrap samples of them."""
    curves = np.array([[run.losses for run in runs] for runs in (clean, outcomes)])
    seeds = len(clean)
    counts = np.random.default_rng(0).multinomial(seeds, [1 / seeds] * seeds, SAMPLES)
    weights = np.concatenate([np.ones((1, seeds)), counts]) / seeds
    sampled = np.einsum("ns,ask->nak", weights, curves)
    levels = np.interp(TARGETS, LOSS_EVERY * np.arange(curves.shape[-1]), curves[0].mean(0))
    rounds = np.stack([crossing(sampled, level, LOSS_EVERY) for level in levels])
    return np.asarray((rounds[..., 1] / rounds[..., 0]).mean(0))


def spread(values: Doubles, form: str) -> str:
    """The first one, and the interval of 95 % of the others."""
    low, high = np.sort(values[1:])[[int(0.025 * SAMPLES), int(0.975 * SAMPLES)]]
    return f"{values[0]:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=16, metavar="N")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="momentum")
    parser.add_argument("--lr", type=float, nargs="+")
    parser.add_argument("--late", choices=("carry", "discard"), default="carry")
    arguments = parser.parse_args()
    seeds = range(1, arguments.seeds + 1)

    print(
        f"{'lr':<6}{'carried':<24}{'contrib.':>9}{'means':>9}"
        f"{'ε if lost':>11}{'rounds ratio':>26}{'share':>26}"
    )
    optimizer, lrs = OPTIMIZERS[arguments.optimizer]
    for lr in arguments.lr or lrs:
        clean = [replace(one_op_late(0.0, seed=seed), lr=lr, optimizer=optimizer).run() for seed in seeds]
        for name, kind in KINDS.items():
            trainings = [kind(seed=seed, late=arguments.late) for seed in seeds]
            outcomes = [replace(training, lr=lr, optimizer=optimizer).run() for training in trainings]
            epsilon, found = lost_epsilon(name, arguments.late, outcomes), ratios(outcomes, clean)
            contributions = np.mean([run.late_contributions for run in outcomes])
            means = np.mean([run.late_means for run in outcomes])
            print(f"{lr:<6}{name:<24}{contributions:>9.1%}{means:>9.1%}{epsilon:>11.3f}", end="")
            print(f"{spread(found, '.3f'):>26}{spread((found - 1) / epsilon, '.2f'):>26}", flush=True)


if __name__ == "__main__":
    main()
