"""Planes from the budget: the policy alone, and in a closed loop with the protocol in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest

from tailcut import Scenario, _native, simulate
from tailcut.epsilon import Epsilon, predicted
from tailcut.grid import GridLayout
from tailcut.mirror import StageReport
from tailcut.policy.budget import Spending
from tailcut.policy.grid import GridSteering
from tailcut.policy.planes import ALL, AdaptivePlanes, FixedPlanes, Planes, _Clock
from tailcut.report import Report

BUDGET = 0.05


class Training:
    """Steps of one bucket: the time that they take follows from their planes."""

    def __init__(self, step_s: Callable[[Planes], float], ranks: int = 4, budget: float = BUDGET) -> None:
        self.step_s = step_s
        self.ranks = ranks
        self.policy = AdaptivePlanes(ranks, budget)
        self.spending = Spending(budget)
        self.correlation = 0.0
        self.lost = self.late = 0.0
        self.key: str | None = "bucket"
        self.op_s = 0.0  # how long a step waits for its op
        self.chosen: list[Planes] = []
        self._now_s = 0.0

    def steps(self, count: int) -> Training:
        for _ in range(count):
            planes = self.policy.choice
            self.chosen.append(planes)
            self._now_s += self.step_s(planes)
            quantized = predicted(self.ranks, self.correlation, *planes)
            report = Report(
                seq=len(self.chosen), status="complete", length=1000, elapsed_s=self.op_s, key=self.key,
                epsilon=Epsilon(quantized=quantized, lost=self.lost, late=self.late),
                correlation=self.correlation,
                scatter=StageReport(planes.scatter), gather=StageReport(planes.gather),
            )  # fmt: skip
            self.spending.after(report)
            self.policy.after(report, self.spending, self._now_s)
        return self

    def changes(self, after: int) -> int:
        return sum(a != b for a, b in pairwise(self.chosen[after:]))


def exposed(compute_s: float, plane_s: float) -> Callable[[Planes], float]:
    return lambda planes: compute_s + plane_s * sum(planes)


def hidden(compute_s: float, plane_s: float) -> Callable[[Planes], float]:
    return lambda planes: max(compute_s, plane_s * sum(planes))


def test_on_a_slow_network_the_fewest_planes_in_the_budget_are_sent() -> None:
    training = Training(exposed(0.06, 0.010)).steps(200)
    assert training.policy.choice == (3, 4)
    assert predicted(4, 0.0, 3, 4) < BUDGET < predicted(4, 0.0, 3, 3)


def test_what_is_carried_costs_less_so_that_fewer_planes_fit() -> None:
    few = AdaptivePlanes(4, BUDGET, coding_carried=True)
    assert few.choice == (2, 2)
    assert few.least_error == predicted(4, 0.0, 2, 2, coding_carried=True)
    assert FixedPlanes(4, 2, coding_carried=True).least_error == few.least_error


def test_behind_computing_all_planes_are_sent() -> None:
    assert Training(hidden(0.5, 0.010)).steps(200).policy.choice == ALL


def test_between_the_two_a_plane_is_sent_if_its_error_costs_more_than_its_time() -> None:
    step_s = exposed(0.1, 0.0001)
    training = Training(step_s).steps(200)
    pairs = [Planes(s, g) for s, g in product(range(1, 17), repeat=2) if predicted(4, 0, s, g) <= BUDGET]
    best = min(pairs, key=lambda planes: step_s(planes) * (1 + predicted(4, 0, *planes)))
    assert training.policy.choice == best
    assert (3, 4) < best < ALL


def test_the_trial_is_over_after_fifty_steps_and_short_where_it_shows_at_once() -> None:
    slow = Training(exposed(0.06, 0.010)).steps(60)
    assert ALL not in slow.chosen
    assert sum(planes != (3, 4) for planes in slow.chosen) <= 5
    quick = Training(hidden(0.5, 0.010)).steps(60)
    assert quick.changes(after=50) == 0


def test_steps_that_wait_for_their_ops_need_no_trial() -> None:
    waiting = Training(exposed(0.06, 0.010))
    waiting.op_s = 0.04
    waiting.steps(200)
    assert set(waiting.chosen) == {(3, 4)}
    (news,) = waiting.policy.take_news()
    assert news.endswith("a step of 130 ms waits for them for 40 ms")
    brief = Training(hidden(0.5, 0.010))
    brief.op_s = 0.05
    assert brief.steps(200).policy.choice == ALL


def test_what_is_hidden_behind_a_backward_pass_is_no_wait() -> None:
    clock = _Clock()
    spans_s = {"big": (0.0, 0.09), "small": (0.05, 0.1), "first": (0.2, 0.21)}  # of a step of 0.22 s
    for step in range(3):
        for key, (entered_s, ended_s) in spans_s.items():
            length = 1000 if key == "big" else 10
            took = clock.step(
                Report(step, "complete", length, ended_s - entered_s, key=key), 0.22 * step + ended_s
            )
    assert took is None  # it is another bucket's op
    took = clock.step(Report(3, "complete", 1000, 0.09, key="big"), 0.66 + 0.09)
    assert took
    assert tuple(took) == pytest.approx((0.22, 0.05))  # from small's entry until both were done


def test_noise_neither_moves_nor_misleads_it() -> None:
    for seed in range(20):
        chance = np.random.default_rng(seed)
        step_s = exposed(0.06, 0.004)
        noisy = Training(lambda planes: step_s(planes) * chance.lognormal(0, 0.15))  # noqa: B023
        noisy.steps(1050)
        assert noisy.changes(after=50) <= 3
        cost = step_s(noisy.policy.choice) * (1 + predicted(4, 0, *noisy.policy.choice))
        assert cost <= 1.05 * step_s(Planes(3, 4)) * (1 + predicted(4, 0, 3, 4))


def test_ranks_that_correlate_need_fewer_planes_and_the_choice_follows() -> None:
    training = Training(exposed(0.06, 0.010))
    training.correlation = 0.9
    training.steps(400)
    few = training.policy.choice
    assert sum(few) < 7
    training.correlation = 0.0
    training.steps(400)
    assert training.spending.recent.total <= 1.1 * BUDGET
    assert sum(training.policy.choice) > sum(few)
    assert training.changes(after=400) <= 3


@pytest.mark.parametrize("source", ["lost", "late"])
def test_what_the_network_costs_leaves_less_for_planes_but_never_nothing(source: str) -> None:
    lossy = Training(exposed(0.06, 0.010))
    setattr(lossy, source, 0.03)
    lossy.steps(200)
    assert predicted(4, 0.0, *lossy.policy.choice) <= 0.02
    setattr(lossy, source, 1.0)
    lossy.steps(1000)
    assert sum(lossy.policy.choice) < 12


def test_a_network_of_another_speed_is_tried_again_but_rarely() -> None:
    rate = [hidden(0.5, 0.001)]
    training = Training(lambda planes: rate[0](planes)).steps(1100)
    assert training.policy.choice == ALL
    rate[0] = exposed(0.5, 0.1)
    training.steps(100)
    assert training.policy.choice == (3, 4)
    assert training.changes(after=50) <= 3


def test_ops_that_are_entered_all_at_once_are_no_trouble() -> None:
    assert Training(lambda planes: 0.0).steps(60).policy.choice == ALL


def test_without_keys_there_are_no_steps_and_the_fewest_planes_stay() -> None:
    training = Training(hidden(0.5, 0.001))
    training.key = None
    training.steps(200)
    assert set(training.chosen) == {(3, 4)}


def test_the_user_may_fix_them_and_a_larger_budget_needs_fewer() -> None:
    assert FixedPlanes(4, 5).choice == (5, 5)
    assert sum(AdaptivePlanes(4, 0.5).choice) < sum(AdaptivePlanes(4, 0.05).choice)
    assert sum(AdaptivePlanes(4, 1e-4).choice) > sum(AdaptivePlanes(4, 0.05).choice)


@pytest.mark.parametrize("budget", [1e-9, 1e-7, 10.0])
def test_any_budget_can_be_lived_with(budget: float) -> None:
    training = Training(exposed(0.06, 0.010), budget=budget).steps(100)
    assert predicted(4, 0.0, *training.policy.choice) <= max(budget, predicted(4, 0.0, *ALL))


def test_the_choice_is_told_with_its_reason() -> None:
    (news,) = Training(exposed(0.06, 0.010)).steps(60).policy.take_news()
    assert news.startswith("3 planes for contributions and 4 for means, ε about 3.7% (budget 5.0%)")
    assert "a step took 130 ms with 3/4 planes, 200 ms with 6/8" in news


# ---- with the protocol -----------------------------------------------------------------------------------
class Watched(GridSteering):
    """As a Group decides, or fixed planes; keeps what it chose."""

    fixed: Planes | None = None

    def __init__(self, rank: int, ranks: int, budget: float = BUDGET) -> None:
        super().__init__(rank=rank, grid=GridLayout(ranks), deadline_s=10.0, budget=budget)
        self.chosen: list[Planes] = []
        self.ends_s: list[float] = []

    def terms(self, length: int, *, keyed: bool = True) -> _native.Terms:
        terms = super().terms(length, keyed=keyed)
        self.chosen.append(Planes(terms.planes, terms.gather_planes))
        return terms

    def after(self, report: Report, now_s: float) -> Report:
        self.ends_s.append(now_s)
        return super().after(report, now_s)


def fixed_to(planes: Planes) -> type[Watched]:
    class Fixed(Watched):
        def __init__(self, rank: int, ranks: int) -> None:
            super().__init__(rank, ranks)
            self._planes = FixedPlanes(ranks, 1)
            self._planes.choice = planes

    return Fixed


def closed_loop(kind: type[Watched], mbit_s: float, compute_s: float, depth: int, ops: int) -> Watched:
    ranks, length = 4, 400_000
    rate = mbit_s * 1e6 / 8
    # Ranks that enter at exactly the same time fall into a rhythm: ops are 15 % longer or shorter by chance.
    enter_s = np.random.default_rng(0).uniform(0, 0.05 * length * 0.5 / rate, (ops, ranks))
    scenario = Scenario(
        ranks=ranks, length=length, ops=ops, codec="planes", elided=True, paced=True, deadline_s=10.0,
        bytes_per_s=rate, uplink_bytes_per_s=rate, queue_bytes=8_000_000, delay_s=20e-6, frame_bytes=42,
        packet_bytes=1408, socket_buffer_bytes=8 << 20, pool_bytes=64 << 20, depth=depth,
        compute_s=compute_s + enter_s,
    )  # fmt: skip
    policies = [kind(rank, ranks) for rank in range(ranks)]
    simulate(scenario, policies=policies)
    return policies[0]


def cost(loop: Watched, settled: int) -> float:
    """(time per step) × (1 + ε) from the op on at which all has settled."""
    ends_s = loop.ends_s[settled:]
    step_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
    return step_s * (1 + loop.spending.recent.total)


@pytest.mark.parametrize("mbit_s", [50, 200, 1_000, 10_000, 100_000])
@pytest.mark.parametrize(("compute_s", "depth"), [(0.0, 1), (0.02, 1), (0.05, 2)])
def test_in_a_closed_loop_the_choice_is_as_good_as_the_best_fixed_one(
    mbit_s: float, compute_s: float, depth: int
) -> None:
    adaptive = closed_loop(Watched, mbit_s, compute_s, depth, ops=160)
    fixed = [Planes(3, 4), Planes(4, 4), Planes(5, 5), Planes(6, 6), Planes(8, 8), Planes(12, 12), ALL]
    best = min(
        cost(closed_loop(fixed_to(planes), mbit_s, compute_s, depth, ops=60), settled=20)
        for planes in fixed
        if predicted(4, 0.0, *planes) <= BUDGET
    )
    assert cost(adaptive, settled=60) <= 1.05 * best
    assert adaptive.spending.recent.total <= 1.1 * BUDGET
    later = adaptive.chosen[50:]
    assert sum(a != b for a, b in pairwise(later)) == 0


def test_in_a_thousand_ops_the_choice_changes_at_most_three_times() -> None:
    loop = closed_loop(Watched, 200, 0.02, 1, ops=1050)
    later = loop.chosen[50:]
    assert sum(a != b for a, b in pairwise(later)) <= 3


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("clean", {}),
        ("lossy-1", {"loss": 0.01}),
        ("trim-50", {"trim": 0.5, "trim_to_bytes": 214, "trim_bytes": 256}),
        ("trim-50, not told", {"trim": 0.5, "trim_to_bytes": 214}),
    ],
)
def test_the_budget_is_kept(name: str, network: dict) -> None:
    """With values: ε is measured. Where half of the packets are trimmed, short ones pass as a whole."""
    ranks, ops = 4, 110
    scenario = Scenario(
        ranks=ranks, length=1 << 16, ops=ops, codec="planes", paced=True, deadline_s=10.0, steering=True,
        planes=0, bytes_per_s=25e6, uplink_bytes_per_s=25e6, queue_bytes=8_000_000, delay_s=20e-6,
        frame_bytes=42, packet_bytes=1408, **network,
    )  # fmt: skip
    simulation = simulate(scenario)
    late = [report for rank in range(ranks) for report in simulation.reports(rank)[70:]]
    assert np.mean([report.epsilon.total for report in late]) <= 1.1 * BUDGET
    assert max(report.scatter.planes for report in late) <= 5
    errors = []
    for op in range(70, ops):
        mean = np.mean(np.asarray(simulation.inputs[op], np.float64), axis=0)
        errors += [np.sum((r - mean) ** 2) / np.sum(mean**2) for r in simulation.results[op]]
    assert np.mean(errors) <= 1.1 * BUDGET


def test_what_trimming_leaves_out_of_packets_comes_again_in_time() -> None:
    """Nobody has said what the switch leaves, so packets hold more than it does."""
    simulation = simulate(
        Scenario(
            ranks=4, length=1 << 16, ops=10, buckets=1, codec="planes", planes=2, packet_bytes=1408, trim=0.5,
            trim_to_bytes=214, deadline_s=1.0,
        )
    )  # fmt: skip
    reports = [report for rank in range(4) for report in simulation.reports(rank)]
    assert sum(report.traffic.trimmed_packets for report in reports) > 100
    assert all(report.status == "complete" and not report.scatter.missing for report in reports)
    assert max(report.elapsed_s for report in reports) < 0.1
