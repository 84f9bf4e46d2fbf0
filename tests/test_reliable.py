"""Reliable blocks are waited for beyond the bounds of their op, up to its deadline; the others are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tailcut import ConfigError, FileStore, Freeze, Group, Scenario, Simulation, _native, simulate
from tailcut.pytorch.reliable import ReliableParameters
from tailcut.simulation.network import RateChange
from tests.oracle import rank_order_mean

BLOCK = 1 << 15
SHARD = 8 * BLOCK
RANKS = 4
DEADLINE_S = 2.0
GIVEN_UP_S = 0.75 * DEADLINE_S
"""Owners close their reliable blocks then, so that the mean still comes."""

# One coordinate of the second block of shard 0, and some on both sides of a border of blocks of shard 2.
RUNS = ((BLOCK + 7, 1), (2 * SHARD + 5 * BLOCK - 10, 20))
RELIABLE = np.zeros(RANKS * SHARD, bool)
RELIABLE[BLOCK : 2 * BLOCK] = True
RELIABLE[2 * SHARD + 4 * BLOCK : 2 * SHARD + 6 * BLOCK] = True

CALM = Scenario(
    ranks=RANKS,
    length=RANKS * SHARD,
    ops=16,
    buckets=1,
    deadline_s=DEADLINE_S,
    steering=True,
    bytes_per_s=125e6,
    packet_bytes=8192,
    reliable=RUNS,
    record=True,
)
"""An op takes 50 ms. After five of them the bounds are known."""
SLOW = replace(CALM, rate_changes=[RateChange(0.3, 3, uplink_factor=0.2)])
CODECS = pytest.mark.parametrize("codec", ["raw", "planes"])


def times_s(simulation: Simulation, rank: int = 0) -> list[float]:
    return [(report.ended_at - report.entered_at) / 1e9 for report in simulation.native.reports[rank]]


def used(simulation: Simulation, op: int) -> np.ndarray:
    """By coordinate: whether the contributions of all ranks are in the mean that its owner has sent."""
    found = np.zeros(RANKS * SHARD, bool)
    for rank in range(RANKS):
        report = simulation.native.reports[rank][op]
        came = [np.frombuffer(granules, bool) for granules in report.contributions()]
        begin = SHARD * report.own_shard
        found[begin : begin + SHARD] = np.repeat(np.logical_and.reduce(came), _native.GRANULE)
    return found


def held(simulation: Simulation, op: int, rank: int) -> np.ndarray:
    """By coordinate: whether the rank had the mean when its op ended."""
    shards = simulation.native.reports[rank][op].held()
    return np.repeat(np.concatenate([np.frombuffer(granules, bool) for granules in shards]), _native.GRANULE)


def assert_reliable(simulation: Simulation) -> None:
    """The reliable coordinates are complete in all ops, and some others are not."""
    cut = 0
    for op in range(simulation.scenario.ops):
        assert used(simulation, op)[RELIABLE].all(), f"op {op}"
        cut += int(np.count_nonzero(~used(simulation, op)))
        for rank in range(RANKS):
            assert held(simulation, op, rank)[RELIABLE].all(), f"op {op}, rank {rank}"
            cut += int(np.count_nonzero(~held(simulation, op, rank)))
    assert cut > 0


@CODECS
def test_a_slow_path_delivers_what_is_reliable_and_is_cut_elsewhere(codec: str) -> None:
    simulation = simulate(replace(SLOW, codec=codec))
    assert_reliable(simulation)
    assert max(max(times_s(simulation, rank)) for rank in range(RANKS)) < GIVEN_UP_S


def test_without_it_a_slow_path_loses_the_same_coordinates() -> None:
    simulation = simulate(replace(SLOW, reliable=()))
    assert not all(used(simulation, op)[RELIABLE].all() for op in range(SLOW.ops))


def test_reliable_coordinates_are_the_mean_of_all_in_every_op() -> None:
    simulation = simulate(SLOW)
    for inputs, results in zip(simulation.inputs, simulation.results, strict=True):
        mean = rank_order_mean(inputs)
        for result in results:
            assert result[RELIABLE].tobytes() == mean[RELIABLE].tobytes()


@CODECS
def test_a_lossy_path_delivers_what_is_reliable(codec: str) -> None:
    assert_reliable(simulate(replace(CALM, codec=codec, loss=0.2, ops=12)))


@CODECS
def test_an_op_without_trouble_takes_as_long_as_before(codec: str) -> None:
    calm = replace(CALM, codec=codec)
    assert times_s(simulate(calm)) == times_s(simulate(replace(calm, reliable=())))


@pytest.mark.parametrize("shard", range(RANKS))
def test_a_dead_rank_costs_the_deadline_only_until_it_is_silent(shard: int) -> None:
    """Shards 0 and 2 have reliable blocks, which nobody owns then."""
    dead = _native.owner_of(shard, 0, RANKS, 0, 1)
    simulation = simulate(replace(CALM, ops=24, freezes=[Freeze(dead, 0.5, None)]))
    for rank in {*range(RANKS)} - {dead}:
        took_s = times_s(simulation, rank)
        slow = [op for op, s in enumerate(took_s) if s > 0.5 * DEADLINE_S]
        assert 1 <= len(slow) <= 4
        assert max(took_s[slow[-1] + 1 :]) < 0.25 * DEADLINE_S


def test_survivors_have_the_reliable_means_of_each_other_before_the_deadline() -> None:
    """Owners give a dead rank up early enough for their means to come in time."""
    simulation = simulate(replace(CALM, freezes=[Freeze(3, 0.5, None)]))
    assert 3 not in [_native.owner_of(shard, 0, RANKS, 0, 1) for shard in (0, 2)]
    for op in range(CALM.ops):
        for rank in range(3):
            assert held(simulation, op, rank)[RELIABLE].all(), f"op {op}, rank {rank}"


def test_a_late_rank_is_waited_for_where_it_is_reliable_also_by_its_own_shard() -> None:
    """Its engine serves its shard on time, and remembers from the last op what is reliable there."""
    owner = _native.owner_of(0, 0, RANKS, 0, 1)
    compute_s = np.zeros((CALM.ops, RANKS))
    compute_s[10, owner] = 0.5
    simulation = simulate(replace(CALM, compute_s=compute_s.tolist()))
    assert_reliable(simulation)
    own = slice(0, SHARD)
    assert (used(simulation, 10)[own] == RELIABLE[own]).all()


def test_runs_that_do_not_fit_the_array_are_refused(tmp_path: Path) -> None:
    with Group(0, 1, FileStore(tmp_path)) as group:
        array = np.ones(100, np.float32)
        group.allreduce(array, reliable=[(0, 100), (100, 0)]).wait()
        for run in [(0, 101), (-1, 5), (5, -1)]:
            with pytest.raises(ConfigError, match="the array has 100"):
                group.allreduce(array, reliable=[run])


# ---- from patterns to runs ---------------------------------------------------------------------------------
def test_matching_neighbours_are_one_run_in_the_order_of_the_bucket() -> None:
    names = ("a.weight", "a.norm.weight", "a.norm.bias", "b.weight", "b.norm.bias", "head")
    parameters = {name: torch.zeros(size) for name, size in zip(names, (10, 3, 2, 20, 4, 1), strict=True)}
    chosen = ReliableParameters(
        {parameter: name for name, parameter in parameters.items()}, ("*.norm.*", "he[a]d", "*.gone")
    )
    assert chosen.unmatched == ["*.gone"]
    assert chosen.runs(list(parameters.values())) == ((10, 5), (35, 5))
    assert chosen.runs([parameters["head"], parameters["b.weight"]]) == ((0, 1),)
    assert chosen.runs([parameters["a.weight"]]) == ()
    assert ReliableParameters({parameters["head"]: "head"}, ()).runs([parameters["head"]]) == ()
