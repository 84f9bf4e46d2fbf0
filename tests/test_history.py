"""Rules 3 and 9: a rank that is behind abstains, and takes the means of ops that are over for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailcut import Report, Scenario, Simulation, _native, simulate
from tailcut.policy.deadline import fixed_bounds, to_native
from tailcut.simulation import Freeze
from tailcut.stats import OpBounds
from tests.groups import open_groups, vectors
from tests.reports import abstained
from tests.tables import rows

DEADLINE_S = 0.1
RTT_S = 20e-6
FROZEN = 3
BOUNDS = OpBounds(1e-3, 1e-3, 1e-3, 1e-4, 1e-4, DEADLINE_S)


class Follower:
    """A policy that abstains where the other ranks have been before."""

    def __init__(self, rank: int, entered: list[int], scenario: Scenario) -> None:
        self._rank = rank
        self._entered = entered
        self._bounds = to_native(BOUNDS._replace(deadline_s=scenario.deadline_s))
        self._planes = scenario.planes

    def terms(self, length: int) -> _native.Terms:
        own = self._entered[self._rank]
        self._entered[self._rank] += 1
        return _native.Terms(self._bounds, self._planes, contribute=own + 1 >= max(self._entered))

    def after(self, report: Report, now_s: float) -> None: ...


def follow(**fields: Any) -> Simulation:
    given = {"ranks": 4, "length": 4096, "deadline_s": DEADLINE_S, "window_ops": 1024, **fields}
    given.setdefault("compute_s", [[1e-3, 1e-3, 1e-3, 0]] * given["ops"])
    scenario = Scenario(**given)
    entered = [0] * scenario.ranks
    return simulate(scenario, policies=[Follower(r, entered, scenario) for r in range(scenario.ranks)])


def missed(simulation: Simulation, rank: int = FROZEN) -> list[Report]:
    return [report for report in simulation.reports(rank) if not report.contributed]


def coordinates_of(owner: int, seq: int, scenario: Scenario) -> np.ndarray:
    """Those that a rank owns in an op without a key."""
    owned = np.zeros(scenario.length, bool)
    for shard in range(scenario.ranks):
        if _native.owner_of(shard, seq, scenario.ranks, scenario.seed) == owner:
            begin, end = _native.shard_range(scenario.length, scenario.ranks, shard)
            owned[begin:end] = True
    return owned


class Abstainer:
    """A policy that abstains in every op, or in none."""

    def __init__(self, contribute: bool) -> None:
        self._terms = _native.Terms(fixed_bounds(DEADLINE_S), 16, contribute=contribute)

    def terms(self, length: int) -> _native.Terms:
        return self._terms

    def after(self, report: Report, now_s: float) -> None: ...


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("buckets", [0, 1])
def test_a_rank_that_abstains_takes_the_mean_of_the_others(codec: str, buckets: int) -> None:
    scenario = Scenario(ranks=4, ops=3, length=4096, codec=codec, buckets=buckets, deadline_s=DEADLINE_S)
    simulation = simulate(scenario, policies=[Abstainer(rank != 2) for rank in range(4)])
    for op in range(3):
        mean = np.mean([simulation.inputs[op][rank] for rank in (0, 1, 3)], axis=0)
        for rank in range(4):
            np.testing.assert_allclose(simulation.results[op][rank], mean, rtol=0, atol=2e-3)
            assert simulation.results[op][rank].tobytes() == simulation.results[op][0].tobytes()
    for rank in range(4):
        assert {report.status for report in simulation.reports(rank)} == {"complete"}  # nobody waits for it
        assert {report.contributed for report in simulation.reports(rank)} == {rank != 2}
        assert {abstained(report) for report in simulation.reports(rank)} == {(2,)}


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("planes", [4, 16])
def test_a_rank_takes_hundreds_of_ops_from_the_history_of_the_others(codec: str, planes: int) -> None:
    """Each in about a round trip, to the last bit as the others had it. They had nothing of its own shard."""
    simulation = follow(ops=400, codec=codec, planes=planes, freezes=[Freeze(FROZEN, 0.05, 0.4)])
    reports = missed(simulation)
    assert len(reports) > 150
    assert {report.status for report in reports} == {"complete"}
    assert np.median([report.elapsed_s for report in reports]) < 4 * RTT_S
    for report in reports:
        of_others = ~coordinates_of(FROZEN, report.seq, simulation.scenario)
        results = simulation.results[report.seq]
        assert results[FROZEN][of_others].tobytes() == results[0][of_others].tobytes()
    last = simulation.results[-1]
    assert all(result.tobytes() == last[0].tobytes() for result in last)


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_who_has_caught_up_has_applied_what_the_others_have(codec: str) -> None:
    """What was late for the shard of the frozen rank enters later means."""
    simulation = follow(ops=300, buckets=2, codec=codec, freezes=[Freeze(FROZEN, 0.05, 0.1)])
    assert len(missed(simulation)) > 20
    for bucket in range(2):
        applied = np.array(simulation.results[bucket::2], np.float64).sum(axis=0)
        assert np.abs(applied - applied[0]).max() < {"raw": 2e-4, "planes": 2e-2}[codec]


def test_what_is_alive_is_sent_before_history() -> None:
    """Contributions to a live op reach the rank while it still lacks means of ops long over."""
    simulation = follow(
        ops=150,
        length=40_000,
        bytes_per_s=25e6,
        pool_bytes=256 << 20,
        deadline_s=1.0,
        compute_s=[[20e-3, 20e-3, 20e-3, 0]] * 150,
        freezes=[Freeze(FROZEN, 0.1, 2.0)],
        record=True,
    )
    overtaken = 0
    for source in range(3):
        alive = 0
        for packet in rows(simulation.native.deliveries()):
            if (packet.source, packet.destination) != (source, FROZEN) or packet.at_ns < 2e9:
                continue
            if not packet.gather and not packet.empty:
                alive = max(alive, packet.seq)
            elif packet.gather:
                overtaken += packet.seq + 10 < alive
    assert overtaken > 100
    assert {report.status for report in missed(simulation)} == {"complete"}


def test_history_that_is_gone_ends_the_op_soon_and_says_so() -> None:
    """The pool holds the means of a part of the ops. The oldest have gone first."""
    simulation = follow(
        ops=400, deadline_s=5.0, pool_bytes=200_000, late="discard", freezes=[Freeze(FROZEN, 0.05, 0.4)]
    )
    reports = missed(simulation)
    gone = [report for report in reports if report.status == "partial"]
    assert len(gone) > 10
    assert all(report.elapsed_s < 0.1 for report in gone)
    assert all(any(link.gather.missing and not link.silent for link in report.links) for report in gone)
    assert [report.seq for report in gone] == list(range(gone[0].seq, gone[-1].seq + 1))
    kept = [report for report in reports if report.seq > gone[-1].seq]
    assert len(kept) > 10
    assert {report.status for report in kept} == {"complete"}
    assert all(simulation.native.counters[rank].evicted_means > 0 for rank in range(3))


def busy(period_s: float, busy_s: float, start_s: float, end_s: float) -> list[Freeze]:
    """The hosts of the others have no time for it again and again."""
    starts_s = np.arange(start_s, end_s, period_s).tolist()
    return [Freeze(rank, at_s, at_s + busy_s) for at_s in starts_s for rank in range(FROZEN)]


def test_means_are_waited_for_while_their_owners_are_busy() -> None:
    """It hears nothing for longer than the bounds of an op that it has just entered."""
    simulation = follow(
        ops=400,
        pool_bytes=1 << 20,  # few means are sent ahead
        compute_s=[[1e-3, 1e-3, 1e-3, 50e-6]] * 400,
        freezes=[Freeze(FROZEN, 0.05, 0.2), *busy(15e-3, 10e-3, start_s=0.2001, end_s=0.4)],
    )
    reports = missed(simulation)
    assert {report.status for report in reports} == {"complete"}
    assert max(report.elapsed_s for report in reports) > 4 * (BOUNDS.scatter_s + BOUNDS.gather_s)


@pytest.mark.parametrize("seed", range(4))
def test_means_that_were_lost_come_again_from_owners_that_are_busy(seed: int) -> None:
    """Their last parts have come, and the grace is over before the rest is sent again."""
    simulation = follow(
        ops=300,
        seed=seed,
        loss=0.1,
        freezes=[Freeze(FROZEN, 0.05, 0.4), *busy(2.2e-3, 2e-3, start_s=0.4, end_s=0.7)],
    )
    assert len(missed(simulation)) > 150
    assert {report.status for report in missed(simulation)} == {"complete"}


def test_means_that_nobody_can_serve_are_not_waited_for() -> None:
    """All others die while it catches up: they are silent after two ops, which end by their deadline."""
    deaths = [Freeze(rank, 0.2001, None) for rank in range(FROZEN)]
    simulation = follow(
        ops=400,
        pool_bytes=1 << 20,
        compute_s=[[1e-3, 1e-3, 1e-3, 50e-6]] * 400,
        freezes=[Freeze(FROZEN, 0.05, 0.2), *deaths],
    )
    reports = missed(simulation)
    waits = [report for report in reports if report.elapsed_s > 1.01 * (BOUNDS.scatter_s + BOUNDS.gather_s)]
    assert [report.ended_by for report in waits] == ["deadline"] * 2
    assert max(report.elapsed_s for report in waits) < 1.01 * DEADLINE_S


def test_a_shard_that_was_reduced_in_part_is_not_evicted() -> None:
    """What was lost of its mean is sent again, from memory that must still be there."""
    evicted = 0
    for seed in range(8):
        simulation = follow(
            ops=100,
            seed=seed,
            loss=0.1,
            pool_bytes=160_000,
            freezes=[Freeze(FROZEN, 0.05, 0.07), *busy(10.1e-3, 10e-3, start_s=0.0701, end_s=0.2)],
        )
        assert {len(simulation.reports(rank)) for rank in range(4)} == {100}
        evicted += sum(counters.evicted_shards for counters in simulation.native.counters)
    assert evicted > 0


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_rank_knows_how_far_the_others_are_and_catches_up(tmp_path: Path, lanes: int) -> None:
    steps, keys = 5, ("a", "b", "c")
    with open_groups(tmp_path, 3, deadline_s=30.0, adaptive=False, lanes=lanes) as groups:
        present, behind = groups[:2], groups[2]
        assert behind.behind_ops == 0
        results = []
        for step in range(steps):
            arrays = [vectors(2, 1000, seed=10 * step + k) for k in range(len(keys))]
            works = [
                group.allreduce(array[rank], key)
                for key, array in zip(keys, arrays, strict=True)
                for rank, group in enumerate(present)
            ]
            results.append((arrays, works))
            while behind.behind_ops < len(keys):
                pass
            for key in keys:  # it takes part without a word of its own, so that nobody waits for it
                behind.allreduce(np.full(1000, 7, np.float32), key, contribute=False).wait()
            assert behind.behind_ops == 0
            assert {work.wait().status for work in works} == {"complete"}
        for arrays, _ in results:
            for array in arrays:
                np.testing.assert_array_equal(array[0], array[1])
