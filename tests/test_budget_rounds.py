"""An error of ε costs 1 + ε times the rounds: logistic regression, the codec's own errors (docs/budget.md).

Noise-dominated: 16 examples for 256 coordinates, so that of a batch gradient's energy 2 % are the gradient at
the start and 0.3 % at the end. The target is 15 % of the excess loss at the start, and a third above the
floor at which this learning rate stays for ever: there noise decides how long it takes, and a larger learning
rate takes longer as well. The rounds are those of the mean curve of 256 seeds: it is smooth, while a single
seed's curve crosses the target by chance, and too early.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rounds import LR, Arm, Curves, Damage, budget_arm, run

ARMS = {
    "exact": Arm(),
    "budget 0.05": budget_arm(0.05),
    "budget 0.2": budget_arm(0.2),
    "0.2, same lr": Arm(damage=Damage.of_budget(0.2)),
    "exact, lr / 1.2": Arm(lr=LR / 1.2),
}
EXACT, *_ = NAMES = list(ARMS)


@pytest.fixture(scope="module")
def curves() -> Curves:
    return run(list(ARMS.values()), 480)


def ratio(curves: Curves, name: str) -> float:
    rounds = curves.rounds()
    return float(rounds[NAMES.index(name)] / rounds[NAMES.index(EXACT)])


@pytest.mark.parametrize(("epsilon", "tolerance"), [(0.05, 0.03), (0.2, 0.05)])
def test_error_of_epsilon_costs_one_plus_epsilon_times_the_rounds(curves, epsilon, tolerance):
    assert ratio(curves, f"budget {epsilon}") == pytest.approx(1 + epsilon, abs=tolerance)


@pytest.mark.parametrize(("epsilon", "tolerance"), [(0.05, 0.03), (0.2, 0.05)])
def test_chance_moves_the_ratio_by_far_less_than_the_tolerance(curves, epsilon, tolerance):
    rounds = curves.resampled_rounds()
    ratios = rounds[:, NAMES.index(f"budget {epsilon}")] / rounds[:, NAMES.index(EXACT)]
    assert np.std(ratios) < tolerance / 3


@pytest.mark.parametrize("epsilon", [0.05, 0.2])
def test_the_codec_made_the_error_that_was_asked_for(curves, epsilon):
    arm = NAMES.index(f"budget {epsilon}")
    assert curves.epsilon[arm] == pytest.approx(epsilon, rel=0.03)
    assert curves.seed_epsilon[arm] == pytest.approx(epsilon, rel=0.12)


def test_gradients_are_noise_in_all_rounds(curves):
    assert curves.signal.max() < 0.03


def test_with_the_same_learning_rate_the_error_costs_more(curves):
    assert ratio(curves, "0.2, same lr") > 1.25


def test_the_smaller_learning_rate_alone_costs_little(curves):
    """So the price is that of the error. Slower steps end nearer to the optimum, and take hardly longer."""
    assert ratio(curves, "exact, lr / 1.2") < 1.06
