"""ε as ops report it, against the error that their results really have: simulated ops with real values."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tailcut import Scenario, simulate
from tailcut.epsilon import STALE_CONTRIBUTION, STALE_MEAN, Epsilon, predicted, unbiased_nmse
from tailcut.simulation import Freeze

LENGTH = 200_000
WITHIN = 0.2
KINDS = ("gaussian", "sparse", "lognormal", "spiky")


def draw(kind: str, chance: np.random.Generator) -> np.ndarray:
    vector = chance.standard_normal(LENGTH)
    if kind == "sparse":
        vector *= chance.random(LENGTH) < 0.01
    if kind == "lognormal":
        vector *= np.exp(2 * chance.standard_normal(LENGTH))
    if kind == "spiky":
        vector *= 0.05
        vector[chance.integers(0, LENGTH, 400)] += 5 * chance.standard_normal(400)
    return vector


def gradients(kind: str, ranks: int, correlation: float, ops: int) -> list[list[np.ndarray]]:
    chance = np.random.default_rng((KINDS.index(kind), ranks, round(100 * correlation)))

    def op() -> list[np.ndarray]:
        common = np.sqrt(correlation) * draw(kind, chance)
        own = [np.sqrt(1 - correlation) * draw(kind, chance) for _ in range(ranks)]
        return [(common + vector).astype(np.float32) for vector in own]

    return [op() for _ in range(ops)]


def run(inputs: list[list[np.ndarray]], **fields) -> tuple[float, Epsilon, float]:
    """The NMSE that results have, the mean ε of the reports, and the mean correlation."""
    ops, ranks = len(inputs), len(inputs[0])
    given = {"ranks": ranks, "length": LENGTH, "ops": ops, "codec": "planes", "deadline_s": 0.5, "seed": 1}
    simulation = simulate(Scenario(**{**given, **fields}), inputs)
    errors = []
    for op, results in enumerate(simulation.results):
        mean = np.mean(np.asarray(inputs[op], np.float64), axis=0)
        errors += [np.sum((result - mean) ** 2) / np.sum(mean**2) for result in results]
    reports = [report for rank in range(ranks) for report in simulation.reports(rank)]
    epsilon = Epsilon(*np.mean([report.epsilon for report in reports], axis=0))
    return float(np.mean(errors)), epsilon, float(np.mean([report.correlation for report in reports]))


@pytest.mark.parametrize(
    ("kind", "ranks", "correlation", "planes"),
    [
        *product(KINDS, [4], [0.0, 0.5, 0.9], [3, 4]),
        *product(KINDS, [2, 8], [0.3], [3]),
        *product(["gaussian", "sparse"], [4], [0.0, 0.5], [2, 6, 12]),
    ],
)
def test_what_is_reported_is_what_planes_cost(kind: str, ranks: int, correlation: float, planes: int) -> None:
    measured, reported, _ = run(gradients(kind, ranks, correlation, ops=3), planes=planes)
    assert reported.total == pytest.approx(measured, rel=WITHIN)
    assert reported.quantized == pytest.approx(reported.total)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planes", [4, 16])
def test_what_is_reported_is_what_lost_packets_cost(kind: str, planes: int) -> None:
    inputs = gradients(kind, 4, 0.2, ops=6)
    measured, reported, _ = run(inputs, planes=planes, loss=0.05, resend=False)
    assert reported.total == pytest.approx(measured, rel=WITHIN)
    assert reported.lost > 3 * reported.quantized
    assert reported.trimmed + reported.absent == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "sparse", "spiky"])
@pytest.mark.parametrize("planes", [4, 16])
def test_what_is_reported_is_what_trimmed_packets_cost(kind: str, planes: int) -> None:
    inputs = gradients(kind, 4, 0.2, ops=4)
    trimming = {"trim": 0.5, "trim_to_bytes": 214, "trim_bytes": 256}
    measured, reported, _ = run(inputs, planes=planes, **trimming)
    assert reported.total == pytest.approx(measured, rel=WITHIN)
    assert reported.trimmed > 3 * reported.quantized
    assert reported.lost == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.7, 0.95])
def test_the_correlation_of_ranks_is_found(correlation: float) -> None:
    _, _, found = run(gradients("gaussian", 4, correlation, ops=2), planes=4)
    assert found == pytest.approx(correlation, abs=0.03)


def test_the_prediction_is_what_ops_report() -> None:
    for ranks, correlation, planes in product([2, 4, 8], [0.0, 0.5], [3, 5]):
        _, reported, _ = run(gradients("gaussian", ranks, correlation, ops=1), planes=planes)
        assert reported.quantized == pytest.approx(predicted(ranks, correlation, planes, planes), rel=0.1)


def test_sixteen_planes_and_raw_cost_nothing() -> None:
    inputs = gradients("lognormal", 4, 0.0, ops=1)
    assert run(inputs, planes=16)[1].total < 1e-7
    assert run(inputs, codec="raw")[1] == Epsilon()


def test_a_rank_that_is_not_there_is_a_smaller_batch_and_not_in_the_total() -> None:
    """Rank 3 says goodbye before the second op: of independent vectors the mean of three errs by 4/3 - 1."""
    scenario = Scenario(ranks=4, length=LENGTH, ops=2, codec="planes", ops_by_rank={3: 1}, deadline_s=0.5)
    reports = simulate(scenario, gradients("gaussian", 4, 0.0, ops=2)).reports(0)
    assert [report.epsilon.absent for report in reports] == [0.0, pytest.approx(1 / 3, rel=0.1)]
    assert reports[1].epsilon.lost == pytest.approx(1 / 4, rel=0.1)  # its share of the mean, which is EMPTY


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_means_that_did_not_come_are_lost_also_where_nothing_is_known_of_them(codec: str) -> None:
    """Of two ranks one leaves: half of every mean is nobody's."""
    scenario = Scenario(ranks=2, length=LENGTH, ops=2, codec=codec, ops_by_rank={1: 1}, deadline_s=0.5)
    report = simulate(scenario, gradients("gaussian", 2, 0.0, ops=2)).reports(0)[1]
    assert report.lost_frac == pytest.approx(0.5, abs=0.001)
    assert report.epsilon.lost == pytest.approx(1 / 2, rel=0.35)  # of the other half's size it knows nothing


# ---- late --------------------------------------------------------------------------------------------------
def cut(ops: int = 1, **fields) -> list[Epsilon]:
    """ε by op at rank 0 of four. From the second op on rank 2 computes beyond the others' deadline."""
    compute_s = np.zeros((ops, 4))
    compute_s[1:, 2] = 0.06
    given = {"ranks": 4, "length": LENGTH, "ops": ops, "codec": "planes", "deadline_s": 0.04, "buckets": 1}
    scenario = Scenario(**{**given, "compute_s": compute_s, **fields})
    return [report.epsilon for report in simulate(scenario, gradients("gaussian", 4, 0.0, ops)).reports(0)]


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_what_is_carried_counts_with_a_share_of_what_it_would_count_if_it_were_lost(codec: str, loss) -> None:
    """Late are a contribution, and the mean of the rank that has not entered; with loss, also others. Where
    an owner's own contribution is alone, it is late too, and errs less than it would alone."""
    _, carried = cut(2, codec=codec, loss=loss, resend=False)
    _, discarded = cut(2, codec=codec, loss=loss, resend=False, late="discard")
    assert discarded.lost > 0.3
    assert 0.98 * STALE_CONTRIBUTION * discarded.lost < carried.late < STALE_MEAN * discarded.lost
    assert carried.lost == pytest.approx(0.0, abs=1e-9)
    assert carried.total == pytest.approx(carried.quantized + carried.trimmed + carried.late)


@pytest.mark.parametrize("fields", [{"buckets": 0}, {"late": "discard"}, {"rows": 2}], ids=str)
def test_what_nothing_carries_is_lost(fields: dict) -> None:
    (epsilon,) = cut(loss=0.05, resend=False, **fields)
    assert epsilon.lost > 0.04
    assert epsilon.late == 0.0


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_what_silent_owners_lack_is_lost_also_where_the_rest_is_carried(codec: str) -> None:
    """Rank 3 is dead, and then silent: its quarter of the mean is lost. What others' packets lose is late."""
    dead = {"codec": codec, "freezes": [Freeze(3, 0.0, None)], "compute_s": ()}
    *_, whole = cut(6, **dead)
    *_, lossy = cut(6, **dead, loss=0.1, resend=False)
    assert whole.lost > 0.2
    assert whole.late == pytest.approx(0.0, abs=1e-9)
    assert lossy.lost == pytest.approx(whole.lost, rel=0.1)
    assert 0.1 * STALE_CONTRIBUTION < lossy.late < 0.3 * STALE_MEAN


def test_one_rank_alone_is_told_what_its_planes_cost() -> None:
    measured, reported, _ = run(gradients("gaussian", 1, 0.0, ops=1), planes=2)
    assert reported.total == pytest.approx(measured, rel=WITHIN)


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_in_a_grid_ops_err_by_what_they_report(codec: str) -> None:
    inputs = gradients("gaussian", 8, 0.0, ops=3)
    measured, reported, found = run(inputs, rows=2, codec=codec, planes=3)
    assert reported.total == pytest.approx(measured, rel=WITHIN, abs=1e-9)
    assert found == pytest.approx(0.0, abs=0.03)


def test_without_values_a_grid_expects_what_it_would_measure() -> None:
    scenario = Scenario(ranks=8, rows=2, length=LENGTH, codec="planes", planes=3, deadline_s=0.5, elided=True)
    (report,) = simulate(scenario).reports(0)
    assert report.epsilon.quantized == pytest.approx(predicted(8, 0.0, 3, 3), rel=0.2)


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_raw_counts_what_is_missing(loss: float) -> None:
    inputs = gradients("gaussian", 4, 0.0, ops=8)
    measured, reported, _ = run(inputs, codec="raw", loss=loss, resend=False)
    assert reported.total == pytest.approx(measured, rel=WITHIN, abs=1e-9)


def test_one_message_errs_by_less_with_every_plane() -> None:
    errors = [unbiased_nmse(planes) for planes in range(1, 17)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(np.pi / 2 - 1, rel=1e-3)
