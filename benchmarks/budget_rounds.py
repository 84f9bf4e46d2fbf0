"""What does a loss budget cost in rounds of training? Rounds with the codec's errors over rounds without.

Logistic regression in the noise-dominated regime (rounds.py). Draws the picture of docs/budget.md. It takes
about three minutes; --runs makes it shorter. The figures hardly depend on the machine: they contain no clock.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rounds import (
    LR,
    SEEDS,
    TARGET,
    Adam,
    Arm,
    Curves,
    Damage,
    Floats,
    Momentum,
    budget_arm,
    joined,
    population_gradient,
    run,
)

from tailcut.epsilon import unbiased_nmse
from tailcut.tools.sim import plot

PICTURE = Path(__file__).parent.parent / "docs" / "budget.svg"
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.4)
TARGETS = (0.15, 0.1, 0.05, 0.04, 0.035, 0.032)
ROUNDS = 560
ADAM_LR = LR / 10
"""A coordinate's root mean square gradient is about 0.1 here, so Adam's steps are as long as those of SGD."""


@dataclass(frozen=True)
class Ratio:
    """Rounds over those of another arm, and the interval of 95 % of bootstrap samples; inf: not reached."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isinf(self.value):
            return "not reached"
        return f"{self.value:.3f} ({self.low:.3f}-{self.high:.3f})"


def ratio(curves: Curves, arm: int, target: float = TARGET) -> Ratio:
    """The ratio of an arm to the first one."""
    rounds, samples = curves.rounds(target), curves.resampled_rounds(target)
    # np.percentile would interpolate between infinite values.
    ratios = np.sort(samples[:, arm] / samples[:, 0])
    low, high = ratios[int(0.025 * len(ratios))], ratios[int(0.975 * len(ratios))]
    return Ratio(float(rounds[arm] / rounds[0]), float(low), float(high))


def measure(arms: Sequence[Arm], runs: int, gradients: Callable[[Floats], Floats] | None = None) -> Curves:
    return joined([run(arms, ROUNDS, seed=seed, gradients=gradients) for seed in range(1, runs + 1)])


def budgets(runs: int) -> tuple[list[Ratio], list[Ratio]]:
    """Prints the table of budgets. Returns the ratios with the learning rate scaled, and with the same
    one."""
    same_lr = [Arm(damage=Damage.of_budget(epsilon)) for epsilon in BUDGETS]
    curves = measure([Arm(), *map(budget_arm, BUDGETS), *same_lr], runs)
    n = len(BUDGETS)
    ratios = [ratio(curves, arm) for arm in range(1, 2 * n + 1)]
    columns = ("planes", "lost (%)", "measured", "seed by seed", "1+ε", "rounds ratio", "with the same lr")
    print(f"{'ε':>6}" + "".join(f"{column:>22}" for column in columns))
    for i, epsilon in enumerate(BUDGETS):
        damage = Damage.of_budget(epsilon)
        cells = (
            str(damage.planes),
            f"{100 * damage.lost:.1f}",
            f"{curves.epsilon[1 + i]:.4f}",
            f"{curves.seed_epsilon[1 + i]:.4f}",
            f"{1 + epsilon:.2f}",
            str(ratios[i]),
            str(ratios[n + i]),
        )
        print(f"{epsilon:>6}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    first, last = curves.signal[0, [0, -1]]
    print(
        f"the gradient's share in a batch gradient's energy: {first:.4f} at the start, {last:.4f} at the end"
    )
    targets(curves)
    return ratios[:n], ratios[n:]


def targets(curves: Curves) -> None:
    """The ratios of the arms of budgets() at several targets. Early targets are reached before noise matters
    much."""
    scaled = 1 + BUDGETS.index(0.2)
    same_lr = scaled + len(BUDGETS)
    print("\nthe same for other targets, ε = 0.2")
    print(f"{'target':>6}{'no error, rounds':>22}{'rounds ratio':>22}{'with the same lr':>22}")
    for target in TARGETS:
        ratios = "".join(f"{ratio(curves, arm, target)!s:>22}" for arm in (scaled, same_lr))
        print(f"{target:>6}{curves.rounds(target)[0]:>22.0f}{ratios}", flush=True)


def learning_rates(runs: int) -> None:
    """Is 1 + ε the price of the error, or of the smaller learning rate? Each arm gets its best learning
    rate."""
    factors = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
    error = Damage.of_budget(0.2)
    arms = [Arm(damage=damage, lr=LR * factor) for damage in (None, error) for factor in factors]
    curves = measure([Arm(), *arms], runs)
    print("\nrounds over those of no error and lr 1, for other learning rates")
    print(f"{'lr':>6}{'no error':>22}{'ε = 0.2':>22}")
    for i, factor in enumerate(factors):
        without, damaged = ratio(curves, 1 + i), ratio(curves, 1 + len(factors) + i)
        print(f"{factor:>6}{without!s:>22}{damaged!s:>22}", flush=True)


def others(runs: int) -> None:
    """Errors of one kind, other optimizers and other regimes, each over the same run without the error."""
    scaled, error = LR / 1.2, Damage.of_budget(0.2)
    two = unbiased_nmse(2)
    sgd = {
        "lost packets alone, ε 0.2": Arm(damage=Damage(lost=1 / 6), lr=scaled),
        f"two planes alone, ε {two:.3f}": Arm(damage=Damage(planes=2), lr=LR / (1 + two)),
        "decoded biased, same lr": Arm(damage=Damage(planes=error.planes, lost=error.lost, biased=True)),
    }
    momentum = {"momentum 0.9, lr / 1.2": Arm(damage=error, lr=scaled, optimizer=Momentum)}
    adam = {
        "Adam, lr / √1.2": Arm(damage=error, lr=ADAM_LR / 1.2**0.5, optimizer=Adam),
        "Adam, same lr": Arm(damage=error, lr=ADAM_LR, optimizer=Adam),
        "Adam, lr / 1.2": Arm(damage=error, lr=ADAM_LR / 1.2, optimizer=Adam),
    }
    whole = {
        "no batch noise, same lr": Arm(damage=error),
        "no batch noise, lr / 1.2": Arm(damage=error, lr=scaled),
    }
    print("\nrounds over those without the error, ε = 0.2 unless it says so")
    for base, arms, gradients in (
        (Arm(), sgd, None),
        (Arm(optimizer=Momentum), momentum, None),
        (Arm(lr=ADAM_LR, optimizer=Adam), adam, None),
        (Arm(), whole, population_gradient),
    ):
        curves = measure([base, *arms.values()], runs, gradients)
        for i, name in enumerate(arms):
            print(f"{name:<32}{ratio(curves, 1 + i)!s:>22}", flush=True)


def draw(scaled: list[Ratio], same: list[Ratio], path: Path) -> None:
    import matplotlib

    figure, axes = plot.new_axes()
    axes.plot((0, BUDGETS[-1]), (1, 1 + BUDGETS[-1]), "-", color="0.5", label="1 + ε")
    for ratios, style, label in (
        (scaled, "oC0", "learning rate divided by 1 + ε"),
        (same, "^C1", "same learning rate"),
    ):
        kept = [(e, r) for e, r in zip(BUDGETS, ratios, strict=True) if np.isfinite(r.high)]
        at, values = [e for e, _ in kept], [r.value for _, r in kept]
        spread = [[r.value - r.low for _, r in kept], [r.high - r.value for _, r in kept]]
        axes.errorbar(at, values, spread, fmt=style, markersize=5, capsize=3, label=label)
    axes.set(
        xlabel="ε, error of the averaged gradient (NMSE)",
        ylabel="rounds, over those without error",
        title=f"logistic regression to an excess loss of {TARGET}",
    )
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize="small")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4, metavar="N", help=f"of {SEEDS} seeds each")
    parser.add_argument("--plot", type=Path, default=PICTURE, metavar="FILE")
    arguments = parser.parse_args()
    plot.check(arguments.plot)
    print(f"Ratios: of the mean curve of {arguments.runs * SEEDS} seeds (95 % of bootstrap samples of them).")
    scaled, same = budgets(arguments.runs)
    draw(scaled, same, arguments.plot)
    learning_rates(arguments.runs)
    others(arguments.runs)
    print(f"wrote {arguments.plot}")


if __name__ == "__main__":
    main()
