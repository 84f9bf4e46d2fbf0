"""What does a late part cost that is carried? Rounds to a loss, over what ε would be if it were lost.

Trains eight replicas in virtual time by the real core, like late_training.py, and gives the share of
docs/budget.md. The figures do not depend on the machine: they contain no clock. It takes about six minutes on
a free core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from replicas import LOSS_EVERY, OP_S, Outcome, Training, means_late, one_op_late, ops_late
from rounds import Doubles, crossing

from tailcut.epsilon import STALE_CONTRIBUTION, STALE_MEAN

LRS = (0.03, 0.05)
TARGETS = range(60, 161, 10)
"""Rounds after which a run with nothing late has the losses to be reached. Loss curves are noisy, so the
ratio is the mean over these."""
SAMPLES = 400
"""Of a bootstrap."""


def means_a_quarter_late(*, seed: int, late: str = "carry") -> Training:
    training = means_late(seed=seed, late=late)
    return replace(training, bounds=training.bounds._replace(gather_s=0.5 * OP_S))


KINDS: dict[str, Callable[..., Training]] = {
    "contributions, one op": partial(one_op_late, 0.15),
    "ranks, 1 to 3 ops": partial(ops_late, 0.4, most=3),
    "ranks, 1 to 8 ops": partial(ops_late, 0.4),
    "means, one op": means_a_quarter_late,
}


def lost_epsilon(kind: str, outcomes: list[Outcome]) -> float:
    """ε if all that did not come in time were lost."""
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
    parser.add_argument("--lr", type=float, nargs="+", default=LRS)
    parser.add_argument("--late", choices=("carry", "discard"), default="carry")
    arguments = parser.parse_args()
    seeds = range(1, arguments.seeds + 1)

    print(
        f"{'lr':<6}{'late':<24}{'contrib.':>9}{'means':>9}{'ε if lost':>11}{'rounds ratio':>26}{'share':>26}"
    )
    for lr in arguments.lr:
        clean = [replace(one_op_late(0.0, seed=seed), lr=lr).run() for seed in seeds]
        for name, kind in KINDS.items():
            outcomes = [replace(kind(seed=seed, late=arguments.late), lr=lr).run() for seed in seeds]
            epsilon, found = lost_epsilon(name, outcomes), ratios(outcomes, clean)
            contributions = np.mean([run.late_contributions for run in outcomes])
            means = np.mean([run.late_means for run in outcomes])
            print(f"{lr:<6}{name:<24}{contributions:>9.1%}{means:>9.1%}{epsilon:>11.3f}", end="")
            print(f"{spread(found, '.3f'):>26}{spread((found - 1) / epsilon, '.2f'):>26}", flush=True)


if __name__ == "__main__":
    main()
