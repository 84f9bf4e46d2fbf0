"""tailcut.stats: totals as a person reads them, as a program does, and how they come together."""

from __future__ import annotations

import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from tailcut import Epsilon, Report, Scenario, Stats, _native, simulate
from tailcut.engine.totals import Totals, add_lanes
from tailcut.mirror import LateCompletion, StageReport, Traffic
from tailcut.policy.deadline import fixed
from tests.groups import allreduce, open_groups, vectors


def test_totals_fit_on_one_line():
    stats = Stats(
        ops=4,
        partial_ops=1,
        short_means=3,
        coordinates=1000,
        lost_coordinates=25,
        traffic=Traffic(sent_bytes=2_510_000_000, received_bytes=999),
    )
    assert (
        str(stats) == "4 ops, 1 partial, 2.50% of the results lost, 3 means without somebody's part; "
        "2.51 GB sent, 999 B received"
    )
    assert "contributes nothing until resynced" in str(Stats(contributing=False))


def test_ranks_that_were_often_at_fault_are_named_the_worst_first():
    stats = Stats(
        verdicts=(
            {"on time": 1000},
            {"on time": 990, "network-late": 10},
            {"on time": 900, "compute-late": 60, "silent": 40},
            {"on time": 980, "lossy link to it": 20},
        )
    )
    notes = str(stats).split("; ")[2:]
    assert notes == [
        "rank 2: compute-late in 60 ops, silent in 40 ops",
        "rank 3: lossy link to it in 20 ops",
    ]


@pytest.mark.parametrize(("lost", "coordinates", "share"), [(0, 0, 0.0), (1, 4, 0.25)])
def test_lost_share_is_of_all_results(lost, coordinates, share):
    assert Stats(lost_coordinates=lost, coordinates=coordinates).lost_frac == share


# ---- from reports and lanes --------------------------------------------------------------------------------


def test_ops_are_counted_from_their_reports():
    totals = Totals()
    late = (LateCompletion(1, "gather", 100, 0.1), LateCompletion(2, "scatter", 100, 0.1))
    short = StageReport(missing=5)
    totals.add(Report(0, "complete", 100, 0.1, scatter=short))
    totals.add(Report(1, "partial", 100, 0.1, lost_frac=0.25, late=late, late_coords=20))
    totals.add(Report(2, "behind", 100, 0.1, behind_ops=70, lost_frac=1.0))
    assert totals.counted == Stats(
        ops=3,
        partial_ops=1,
        lossy_ops=2,
        short_means=1,
        behind_ops=70,
        coordinates=300,
        lost_coordinates=125,
        late_coordinates=20,
        late_completions=2,
    )


def lane(**counters: Any) -> Any:
    none = dict.fromkeys(_native.Counters.fields(), 0)
    return SimpleNamespace(
        protocol=SimpleNamespace(**{**none, "traffic": Traffic(), "rejected": {}, **counters}),
        socket=SimpleNamespace(blocked_sends=1, failed_sends=2),
        uncorrected_packets=3,
        pool_used_bytes=4,
        memory_bytes=5,
        rtt_ns=[0, 6_000_000],
        contributing="evicted_means" not in counters,
    )


def test_lanes_add_up_and_one_that_does_not_contribute_is_enough():
    stats = Stats()
    first = lane(traffic=Traffic(late_packets=1), rejected={"late": 1}, lost_packets=6)
    second = lane(traffic=Traffic(late_packets=2), rejected={"late": 2, "type": 1}, evicted_means=7)
    add_lanes(stats, [first, second])
    assert stats == Stats(
        traffic=Traffic(late_packets=3),
        rejected={"late": 3, "type": 1},
        lost_packets=6,
        evicted_means=7,
        uncorrected_packets=6,
        blocked_sends=2,
        failed_sends=4,
        pool_used_bytes=8,
        memory_bytes=10,
        rtt_s=(0.0, 0.006),
        contributing=False,
    )


def test_every_native_counter_has_its_total():
    assert set(_native.Counters.fields()) <= {field.name for field in fields(Stats)}


def test_what_is_trimmed_resent_and_late_reaches_the_counters_of_an_endpoint():
    trimmed = simulate(Scenario(ranks=3, length=20_000, ops=2, trim=0.5, resend=False, seed=1)).native
    assert sum(c.traffic.trimmed_packets for c in trimmed.counters) == trimmed.network.trimmed_packets > 0
    lossy = simulate(Scenario(ranks=3, length=20_000, loss=0.1)).native
    assert sum(c.traffic.resent_packets for c in lossy.counters) > 0
    for counters, (report,) in zip(lossy.counters, lossy.reports, strict=True):
        assert counters.traffic.resent_packets >= report.traffic.resent_packets > 0
    slow = simulate(Scenario(ranks=2, length=20_000, ops=2, delay_s=0.04, bytes_per_s=2e6)).native
    assert all(c.traffic.late_packets > 0 for c in slow.counters)


def test_late_means_and_completions_of_a_simulated_group_are_counted():
    """Each op has twice as long to send as its deadline allows, and the next begins after a pause."""
    scenario = Scenario(
        ranks=2, length=20_000, ops=3, delay_s=0.04, bytes_per_s=2e6, compute_s=[[0.5] * 2] * 3
    )
    totals = Totals()
    for report in simulate(scenario).reports(0):
        totals.add(report)
    assert totals.counted.partial_ops == 3
    assert totals.counted.late_coordinates > 0
    assert totals.counted.late_completions > 0


def test_a_groups_traffic_is_in_its_stats(tmp_path):
    with open_groups(tmp_path, 2) as groups:
        reports = allreduce(groups, vectors(2, 10_000))
    stats = groups[0].stats()  # of the closed group: its lanes have told all
    assert stats.ops == 1
    assert stats.traffic.sent_bytes >= reports[0].traffic.sent_bytes > 20_000
    assert stats.feedback_packets > 0


# ---- for programs ------------------------------------------------------------------------------------------


def test_totals_are_json_with_every_field_and_what_follows_from_them():
    stats = Stats(
        ops=3,
        traffic=Traffic(trimmed_packets=5),
        rejected={"late": 1},
        rtt_s=(0.0, 0.1),
        bounds={1023: fixed(10.0)},
        epsilon=Epsilon(lost=0.25),
        verdicts=({"on time": 3},),
    )
    found = stats.to_dict()
    derived = {name for name, value in vars(Stats).items() if isinstance(value, property)}
    assert found.keys() == {field.name for field in fields(Stats)} | derived
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["traffic"]["trimmed_packets"] == 5
    assert found["bounds"]["1023"]["deadline_s"] == 10.0
    assert found["epsilon"]["lost"] == 0.25
    assert found["rtt_s"] == [0.0, 0.1]


def test_counts_of_earlier_runs_add_up_and_unknown_ones_are_left_out():
    before = Stats(ops=2, budget=1, epoch=3, pool_used_bytes=9, traffic=Traffic(sent_bytes=10)).counts()
    assert json.loads(json.dumps(before)) == before
    assert not {"bounds", "verdicts", "drop_share", "budget", "contributing", "memory_bytes"} & before.keys()
    unknown = {**before, "of_old": 1, "traffic": {**before["traffic"], "of_old": 1}}
    now = Stats(ops=1, epoch=1, pool_used_bytes=1, traffic=Traffic(sent_bytes=5, late_packets=1)).plus(
        unknown
    )
    assert now == Stats(ops=3, epoch=1, pool_used_bytes=1, traffic=Traffic(sent_bytes=15, late_packets=1))
    assert Stats(ops=1).plus({}) == Stats(ops=1)
