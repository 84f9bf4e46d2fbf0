"""The twelve rules of an op (docs/architecture.md), one group of tests for each. All in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tailcut import ConfigError, Freeze, Partition, Report, Scenario, Simulation, _native, simulate
from tailcut.policy.deadline import fixed, to_native
from tailcut.simulation.network import RateChange
from tests import oracle
from tests.reports import abstained, empty, lost
from tests.tables import rows

DEADLINE_S = 0.1
SCATTER_S = 0.05  # t_B: half of the deadline
CAP_S = 0.075


def mean_of(simulation, op: int, ranks) -> bytes:
    return oracle.rank_order_mean([simulation.inputs[op][rank] for rank in ranks]).tobytes()


def result(simulation, op: int, rank: int) -> bytes:
    return simulation.results[op][rank].tobytes()


# ---- rule 1: no barrier; SCATTER closes by the majority's clock --------------------------------------------


def test_rule_1_a_dead_rank_does_not_hold_up_the_shards_of_the_others() -> None:
    simulation = simulate(Scenario(ranks=4, length=4096, freezes=[Freeze(3, 0.0, None)], record=True))
    oracle.check(simulation)
    for rank in range(3):
        (report,) = simulation.reports(rank)
        assert lost(report, "gather") == (0, 0, 0, 1)
        assert report.missing_from == (3,)
        assert report.scatter.ended_s == pytest.approx(SCATTER_S, abs=1e-3)


def test_rule_1_the_fastest_rank_does_not_start_the_clock_for_the_majority() -> None:
    late_s = 0.06  # later than t_B after the first entry, within t_B of the majority's
    simulation = simulate(Scenario(ranks=4, length=4096, compute_s=[[0, late_s, late_s, late_s]]))
    for rank in range(4):
        assert simulation.reports(rank)[0].status == "complete"
        assert result(simulation, 0, rank) == mean_of(simulation, 0, range(4))


def test_rule_1_scatter_closes_a_bound_after_the_majority_has_entered() -> None:
    simulation = simulate(Scenario(ranks=4, length=4096, compute_s=[[0, 0.01, 0.01, 1.0]], record=True))
    oracle.check(simulation)
    (native,) = simulation.native.reports[0]
    assert native.closed_at == pytest.approx((0.01 + SCATTER_S) * 1e9, abs=1e6)
    assert lost(simulation.reports(0)[0], "scatter") == (0, 0, 0, 1)


def test_rule_1_the_first_arrival_caps_the_wait_for_a_majority() -> None:
    simulation = simulate(Scenario(ranks=4, length=4096, compute_s=[[0, 1.0, 1.0, 1.0]], record=True))
    oracle.check(simulation)
    (native,) = simulation.native.reports[0]
    assert native.closed_at == pytest.approx(CAP_S * 1e9, abs=1e6)


def test_rule_1_packets_for_ops_not_reached_wait_in_the_pool() -> None:
    compute = [[0, 0, 0], [0, 0, 0.03], [0, 0, 0]]  # rank 2 enters op 1 late: the others are already there
    simulation = simulate(Scenario(ranks=3, length=4096, ops=3, compute_s=compute, depth=3))
    for op in range(3):
        for rank in range(3):
            assert result(simulation, op, rank) == mean_of(simulation, op, range(3))


def test_rule_1_senders_do_not_overrun_the_pool_of_a_rank_that_is_behind() -> None:
    compute = [[0, 0, 0.04]] + [[0, 0, 0]] * 7
    scenario = Scenario(ranks=3, length=4096, ops=8, depth=8, compute_s=compute, pool_bytes=1 << 16)
    simulation = simulate(scenario)  # room for one op of eight
    for rank in range(3):
        assert simulation.native.counters[rank].rejected["pool"] == 0
        assert [result(simulation, op, rank) for op in range(8)] == [
            mean_of(simulation, op, range(3)) for op in range(8)
        ]


class ShortGrace:
    """Fixed bounds, and a tenth of the deadline after the last packets."""

    def terms(self, length: int) -> _native.Terms:
        bounds = fixed(DEADLINE_S)._replace(scatter_grace_s=DEADLINE_S / 10, gather_grace_s=DEADLINE_S / 10)
        return _native.Terms(to_native(bounds), 16)

    def after(self, report: Report, now_s: float) -> None: ...


def test_rule_1_a_last_packet_that_was_trimmed_to_nothing_is_not_waited_for() -> None:
    """Raw packets of which less than a granule is left still say that all has been sent."""
    simulation = simulate(
        Scenario(ranks=3, length=3000, trim=1.0, trim_to_bytes=_native.HEADER_BYTES + 100),
        policies=[ShortGrace()] * 3,
    )
    for rank in range(3):
        (report,) = simulation.reports(rank)
        assert report.scatter.ended_by == report.gather.ended_by == "grace"
        assert report.elapsed_s < SCATTER_S


def test_rule_1_an_op_ends_by_its_deadline_though_the_next_one_was_heard_of_first() -> None:
    """Rank 0 has closed its shard of op 1 and heard no word of op 0 when it enters op 0, nor later."""
    simulation = simulate(
        Scenario(
            ranks=2,
            length=3000,
            ops=2,
            depth=2,
            compute_s=[[0.12, 0.0], [0.0, 0.01]],
            partitions=[Partition(0.0, 0.005, (0,)), Partition(0.04, 1.0, (0,))],
            resend=False,
        )
    )
    oracle.check_deadlines(simulation)


# ---- rule 2: owner duty does not wait for the owner's own gradient -----------------------------------------


def late_owner(**more) -> Scenario:
    return Scenario(ranks=4, length=4096, compute_s=[[0, 0, 0.09, 0]], record=True, **more)


def test_rule_2_a_rank_late_in_computing_costs_its_contribution_not_its_shard() -> None:
    simulation = simulate(late_owner())
    oracle.check(simulation)
    for rank in (0, 1, 3):
        (report,) = simulation.reports(rank)
        assert report.status == "complete"
        assert report.lost_frac == 0
        assert result(simulation, 0, rank) == mean_of(simulation, 0, (0, 1, 3))


def contributions(simulation: Simulation, rank: int) -> list[Any]:
    """Packets of values that came from the rank."""
    packets = rows(simulation.native.deliveries())
    return [p for p in packets if p.source == rank and not p.gather and not p.empty]


def test_rule_2_the_late_rank_finds_the_result_and_sends_no_contribution() -> None:
    simulation = simulate(late_owner())
    (report,) = simulation.reports(2)
    assert report.elapsed_s == 0
    assert result(simulation, 0, 2) == mean_of(simulation, 0, (0, 1, 3))
    assert contributions(simulation, 2) == []


def test_rule_2_a_late_rank_sends_no_contribution_to_a_shard_whose_mean_it_holds() -> None:
    """Rank 3 is dead, so the late rank's op is incomplete when it enters; the means of 0 and 1 are there."""
    scenario = Scenario(
        ranks=4, length=4096, compute_s=[[0, 0, 0.06, 0]], freezes=[Freeze(3, 0.0, None)], record=True
    )
    simulation = simulate(scenario)
    oracle.check(simulation)
    assert contributions(simulation, 2) == []


# ---- rule 3: behind, and further behind --------------------------------------------------------------------

WHILE_FROZEN = (0.05, 0.05, 0.05, 0.001)
"""How long ranks compute before an op: the one that was frozen, the last, catches up with the others."""


def test_rule_3_a_rank_within_the_window_finds_its_results() -> None:
    frozen = Freeze(3, 0.0, 0.5)  # seven ops of the others, of which two wait for it
    simulation = simulate(
        Scenario(ranks=4, length=4096, ops=12, compute_s=[WHILE_FROZEN] * 12, freezes=[frozen], record=True)
    )
    oracle.check(simulation)
    reports = simulation.reports(3)
    assert all(report.behind_ops == 0 for report in reports)
    assert all(report.elapsed_s < 0.001 for report in reports[1:6])  # these were over
    for op in range(1, 12):  # its peers had given up its own shard, which it has reduced since
        differ = np.flatnonzero(simulation.results[op][3] != simulation.results[op][0])
        shard = next(shard for shard in range(4) if _native.owner_of(shard, op, 4, 0) == 3)
        begin, end = _native.shard_range(4096, 4, shard)
        assert all(begin <= at < end for at in differ)
        assert not simulation.results[op][0][differ].any()
    assert all(result(simulation, 11, rank) == mean_of(simulation, 11, range(4)) for rank in range(4))


def test_rule_3_a_rank_that_was_frozen_waits_for_no_contribution_to_an_op_that_is_over() -> None:
    """Credit ran out: its peers could not send what they had, and ended their ops without it."""
    scenario = Scenario(
        ranks=4,
        length=200_000,
        ops=12,
        compute_s=[WHILE_FROZEN] * 12,
        freezes=[Freeze(3, 0.0, 0.5)],
        socket_buffer_bytes=1 << 17,
        record=True,
    )
    simulation = simulate(scenario)
    oracle.check_deadlines(simulation)
    caught_up = [report for report in simulation.reports(3)[1:] if report.lost_frac]
    assert len(caught_up) >= 3
    for report in caught_up:
        assert report.elapsed_s < SCATTER_S / 2
        assert report.lost_frac == pytest.approx(0.25, abs=0.02)  # its own shard: zero for everybody
        assert result(simulation, report.seq, 3) == result(simulation, report.seq, 0)


def test_rule_3_a_rank_beyond_the_window_jumps_to_the_groups_seq() -> None:
    frozen = Freeze(3, 0.0, 1.0)
    scenario = Scenario(
        ranks=4,
        length=4096,
        ops=30,
        window_ops=4,
        compute_s=[WHILE_FROZEN] * 30,
        freezes=[frozen],
        record=True,
    )
    simulation = simulate(scenario)
    behind = [report for report in simulation.reports(3) if report.behind_ops]
    assert behind
    assert behind[0].behind_ops > 4
    assert behind[0].elapsed_s < DEADLINE_S
    assert not any(simulation.results[behind[0].seq][3])
    after = simulation.reports(3)[simulation.reports(3).index(behind[-1]) + 1]
    assert after.seq >= behind[0].seq + behind[0].behind_ops


def test_rule_3_a_rank_that_fell_behind_in_the_middle_of_an_op_gets_a_zero_bucket() -> None:
    frozen = Freeze(3, 0.002, 1.5)  # in the middle of op 0, parts of which have arrived
    scenario = Scenario(
        ranks=4,
        length=200_000,
        ops=40,
        window_ops=4,
        bytes_per_s=2e8,
        freezes=[frozen],
        compute_s=[[0.001] * 4] * 40,
    )
    simulation = simulate(scenario)
    first = simulation.reports(3)[0]
    assert (first.seq, first.status, first.lost_frac) == (0, "behind", 1.0)
    assert first.behind_ops > 4
    assert not simulation.results[0][3].any()


def behind_and_back(**more) -> list[Report]:
    """Reports of rank 0, which owns a shard in every op, while rank 3 is beyond the window and comes back."""
    scenario = Scenario(
        ranks=4,
        length=4096,
        ops=40,
        window_ops=4,
        compute_s=[WHILE_FROZEN] * 40,
        freezes=[Freeze(3, 0.0, 1.0)],
        **more,
    )
    simulation = simulate(scenario)
    joined = next(i for i, report in enumerate(simulation.reports(3)) if report.behind_ops)
    assert not simulation.reports(3)[joined + 1].contributed
    return simulation.reports(0)


def test_rule_3_a_rank_that_jumped_abstains_until_it_is_resynced() -> None:
    reports = behind_and_back()
    without = [report for report in reports if 3 in abstained(report)]
    assert without
    assert all(report.status == "complete" for report in without[1:-1])  # nobody waits for it
    assert reports[-1] in without or reports[-1].missing_from == (3,)


def test_rule_3_a_resynced_rank_contributes_again() -> None:
    assert any(
        abstained(report) == () and not report.missing_from
        for report in behind_and_back(resync_before={3: 15})
    )


def test_rule_3_dead_ranks_do_not_count_among_those_that_have_gone_on() -> None:
    """Half of the group is dead, and rank 1 was frozen: that it is behind shows in rank 0 alone."""
    scenario = Scenario(
        ranks=4,
        length=3000,
        ops=400,
        window_ops=8,
        deadline_s=0.05,
        compute_s=[[0.001] * 4] * 400,
        freezes=[Freeze(2, 0.01, None), Freeze(3, 0.01, None), Freeze(1, 0.02, 0.6)],
    )
    behind = [report.behind_ops for report in simulate(scenario).reports(1) if report.behind_ops]
    assert behind
    assert behind[0] > scenario.window_ops


def test_rule_3_one_rank_far_ahead_does_not_drag_the_others_along() -> None:
    lie = _native.Header()
    lie.type, lie.group_tag, lie.source, lie.seq, lie.stamp_us = 2, group_tag(seed=0), 1, 5000, 1
    simulation = simulate(Scenario(ranks=4, length=1000, ops=3, injections=[(0.0, 0, lie.pack())]))
    assert all(report.behind_ops == 0 for report in simulation.reports(0))
    assert result(simulation, 2, 0) == mean_of(simulation, 2, range(4))


# ---- rule 4: counts, not N ---------------------------------------------------------------------------------


def test_rule_4_the_mean_is_over_what_arrived() -> None:
    simulation = simulate(Scenario(ranks=5, length=20_000, loss=0.2, seed=4, resend=False, record=True))
    oracle.check(simulation)
    (report,) = simulation.reports(0)
    assert 0.05 < report.scatter.missing / report.scatter.coords < 0.4


def test_rule_4_packets_of_different_widths_align() -> None:
    for packet_bytes in (256, 512, 1280):
        simulation = simulate(
            Scenario(ranks=3, length=3000, packet_bytes=packet_bytes, trim=0.5, seed=9, record=True)
        )
        oracle.check(simulation)


def test_rule_4_a_granule_that_nobody_delivered_travels_as_empty_and_is_zero() -> None:
    came_empty = 0
    for seed in range(5):
        simulation = simulate(
            Scenario(
                ranks=3,
                length=20_000,
                loss=0.5,
                resend=False,
                seed=seed,
                compute_s=[[0.09, 0, 0]],
                packet_bytes=256,
                record=True,
            )
        )
        oracle.check(simulation)
        came_empty += simulation.reports(1)[0].links[0].gather.empty
    assert came_empty > 0


def alone_in_an_op(gone: dict) -> tuple[Report, np.ndarray]:
    """Rank 2 of 3 is gone. Rank 1 ends the last op without having heard of rank 0, and tells it so while its
    SCATTER is open. What rank 0 reports, and its result in its own shard."""
    ops, length = 5, 3000
    compute_s = [[0.0] * 3] * (ops - 1) + [[0.08, 1e-3, 0.0]]
    before = simulate(Scenario(ranks=3, length=length, ops=ops - 1, **gone))
    began_s = max(r.ended_at for r in before.native.reports[1]) / 1e9
    cut = Partition(began_s + 5e-4, began_s + 0.11, (0,))
    simulation = simulate(
        Scenario(ranks=3, length=length, ops=ops, compute_s=compute_s, partitions=[cut], record=True, **gone)
    )
    oracle.check(simulation)
    assert lost(simulation.reports(1)[-1], "gather")[0] == 1
    native = simulation.native.reports[0][-1]
    begin, end = _native.shard_range(length, 3, native.own_shard)
    return simulation.reports(0)[-1], simulation.results[-1][0][begin:end]


@pytest.mark.parametrize(
    "gone", [{"ops_by_rank": {2: 1}}, {"freezes": [Freeze(2, 0.0, None)]}], ids=["left", "silent"]
)
def test_rule_4_the_owner_alone_is_no_mean_when_others_have_left_or_died(gone: dict) -> None:
    report, own = alone_in_an_op(gone)
    assert empty(report)[0] == 1
    assert not own.any()


# ---- rule 5: one arithmetic --------------------------------------------------------------------------------


def test_rule_5_the_reduction_is_in_rank_order_whatever_the_order_of_arrival() -> None:
    for seed in range(10):
        simulation = simulate(Scenario(ranks=8, length=5000, jitter_s=5e-3, seed=seed))
        assert result(simulation, 0, seed % 8) == mean_of(simulation, 0, range(8))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_rule_5_the_fast_path_equals_the_scalar_path_bit_for_bit(ranks: int, length: int) -> None:
    random = np.random.default_rng((ranks, length))
    exponents = random.integers(-40, 38, (ranks, length))
    inputs = [(random.standard_normal(length) * 10.0**e).astype(np.float32) for e in exponents]
    simulation = simulate(Scenario(ranks=ranks, length=length), [inputs])
    expected = []
    for k in range(length):  # the scalar twin
        total = inputs[0][k]
        for contribution in inputs[1:]:
            total = np.float32(total + contribution[k])
        expected.append(np.float32(total / np.float32(ranks)))
    assert result(simulation, 0, 0) == np.array(expected, np.float32).tobytes()


# ---- rule 6: the owner applies what it sent ----------------------------------------------------------------


def test_rule_6_without_gather_loss_all_replicas_are_bit_identical() -> None:
    for seed in range(8):
        compute = np.random.default_rng(seed).uniform(0, 0.09, (1, 5)).tolist()  # contributions go missing
        simulation = simulate(Scenario(ranks=5, length=5000, compute_s=compute, seed=seed))
        assert all(report.lost_frac == 0 for rank in range(5) for report in simulation.reports(rank))
        assert len({result(simulation, 0, rank) for rank in range(5)}) == 1


# ---- rule 7: ownership is hashed ---------------------------------------------------------------------------


def test_rule_7_every_shard_has_one_owner_in_every_op() -> None:
    for seq in range(100):
        assert sorted(_native.owner_of(shard, seq, 7, 3) for shard in range(7)) == list(range(7))


def test_rule_7_ownership_does_not_stick_when_ranks_divide_the_buckets_of_a_step() -> None:
    ranks, buckets, steps = 4, 8, 2000
    owners = Counter(_native.owner_of(0, buckets * step, ranks, 1) for step in range(steps))
    assert all(abs(owners[rank] / steps - 1 / ranks) < 0.05 for rank in range(ranks))


def test_rule_7_the_seed_decides() -> None:
    sequences = {tuple(_native.owner_of(0, seq, 8, seed) for seq in range(64)) for seed in range(20)}
    assert len(sequences) == 20


# ---- rule 8: one domain for all ranks ----------------------------------------------------------------------


def test_rule_8_randomness_never_reaches_the_values_of_the_raw_codec() -> None:
    inputs = [[np.random.default_rng(rank).standard_normal(3000, np.float32) for rank in range(4)]]
    results = {result(simulate(Scenario(ranks=4, length=3000, seed=seed), inputs), 0, 0) for seed in range(6)}
    assert len(results) == 1


# ---- rule 9: late is not lost ------------------------------------------------------------------------------


def test_rule_9_means_that_come_after_the_end_are_counted_and_kept_out_of_the_bucket() -> None:
    scenario = Scenario(ranks=2, length=20_000, ops=2, delay_s=0.04, bytes_per_s=2e6, record=True)
    simulation = simulate(scenario)
    oracle.check(simulation)
    assert simulation.reports(0)[0].lost_frac > 0
    counters = simulation.native.counters[0]
    assert counters.traffic.late_packets > counters.rejected["late"]  # not contributions alone


def test_rule_9_what_comes_too_late_does_not_delay_the_next_op() -> None:
    """Twice as much to send as the deadline allows: every op loses alike, as stale means are given up."""
    scenario = Scenario(ranks=4, length=200_000, ops=30, bytes_per_s=6e6, socket_buffer_bytes=1 << 17)
    lost = [report.lost_frac for report in simulate(scenario).reports(0)]
    assert max(lost[1:]) < 1.3 * lost[0]


@pytest.mark.parametrize("duplicate", [0.0, 1.0])
def test_rule_9_owners_send_the_rest_of_a_mean_to_a_rank_that_has_ended(duplicate: float) -> None:
    """Next to nothing reaches rank 1 from the middle of its first op until after its end."""
    scenario = Scenario(
        ranks=4,
        length=60_000,
        ops=2,
        compute_s=[[0] * 4, [0.5] * 4],
        bytes_per_s=1e7,
        duplicate=duplicate,
        socket_buffer_bytes=1 << 17,  # little is on its way when rank 1 ends the op
        rate_changes=[RateChange(0.015, 1, downlink_factor=1e-3), RateChange(2 * DEADLINE_S, 1)],
        paced=True,
        record=True,
    )
    simulation = simulate(scenario)
    oracle.check(simulation)
    cut, following = simulation.native.reports[1]
    missing = cut.gather.missing
    assert missing > 0.3 * cut.bucket_len
    assert following.late_coords == missing  # all of it, and what came twice once
    assert following.status == "complete"


# ---- rule 10: non-finite gradients are never averaged away -------------------------------------------------


def poisoned(value: float, at: int, ranks: int = 4, length: int = 4096, by: int = 1, **more):
    scenario = Scenario(ranks=ranks, length=length, **more)
    inputs = [[scenario.bucket(0, rank) for rank in range(ranks)]]
    inputs[0][by][at] = value
    return simulate(scenario, inputs)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1500, 4095])
def test_rule_10_every_rank_sees_an_inf_or_nan_of_any_rank(value: float, at: int) -> None:
    simulation = poisoned(value, at)
    for rank in range(4):
        assert simulation.reports(rank)[0].non_finite
        assert not np.isfinite(simulation.results[0][rank]).all()


@pytest.mark.parametrize("length", [4096, 200_000], ids=["sent", "no-credit-to-send-it"])
def test_rule_10_what_no_owner_has_accepted_decides_nothing(length: int) -> None:
    shard = next(s for s in range(4) if _native.owner_of(s, 0, 4, 0) == 3)
    _, end = _native.shard_range(length, 4, shard)
    dead = [Freeze(3, 0.0, None)]  # its owner
    simulation = poisoned(np.nan, end - 1, length=length, freezes=dead, socket_buffer_bytes=1 << 16)
    for rank in range(3):
        assert not simulation.reports(rank)[0].non_finite
        assert np.isfinite(simulation.results[0][rank]).all()


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_rule_10_ranks_decide_alike_on_a_contribution_that_is_refused(codec: str) -> None:
    """The rank that holds it entered too late for all owners but itself: they have closed without it."""
    late = [[0.0, 0.0, 0.0, 0.07]]
    own = next(s for s in range(4) if _native.owner_of(s, 0, 4, 0) == 3)
    for shard in range(4):
        begin, _ = _native.shard_range(4096, 4, shard)
        simulation = poisoned(np.nan, begin, by=3, compute_s=late, codec=codec)
        verdicts = [simulation.reports(rank)[0].non_finite for rank in range(4)]
        assert verdicts == [False] * 4, (shard, own)
        assert all(np.isfinite(simulation.results[0][rank]).all() for rank in range(4))


def test_rule_10_finite_buckets_are_not_flagged() -> None:
    simulation = poisoned(np.finfo(np.float32).max, 7)
    assert not any(simulation.reports(rank)[0].non_finite for rank in range(4))


def test_rule_10_an_overflow_in_the_sum_is_seen() -> None:
    inputs = [[np.full(100, 3e38, np.float32) for _ in range(2)]]
    simulation = simulate(Scenario(ranks=2, length=100), inputs)
    assert all(simulation.reports(rank)[0].non_finite for rank in range(2))


# ---- rule 11: everything from the network is hostile -------------------------------------------------------


def group_tag(seed: int) -> int:
    """The tag that the simulated network gives the group of this seed (splitmix64)."""
    mask = (1 << 64) - 1
    x = (seed + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) % _native.TAGS


def shard_of(owner: int, seq: int) -> int:
    return next(shard for shard in range(3) if _native.owner_of(shard, seq, 3, 0) == owner)


def forged(**fields) -> _native.Header:
    """A contribution of rank 1 to the first granule of rank 0's shard, before the fields are spoilt."""
    header = _native.Header()
    values = {
        "type": 1,
        "group_tag": group_tag(0),
        "source": 1,
        "shard": shard_of(0, fields.get("seq", 0)),
        "bucket_len": 3000,
        "count": 64,
    }
    for name, value in (values | {"entry_us": 0, "stamp_us": 1} | fields).items():
        setattr(header, name, value)
    return header


ones = np.ones(64, np.float32).tobytes()
HOSTILE = {
    "short": forged().pack()[:63],
    "short-version": b"\x7c",
    "version": b"\x7c\x01" + forged().pack()[2:] + ones,
    "version-header": b"\x7c\x01" + forged().pack()[2:48],  # that of version 1 had 48 bytes
    "type": forged(flags=0x40).pack() + ones,
    "group": forged(group_tag=1).pack() + ones,
    "source": forged(source=3).pack() + ones,
    "source-self": forged(source=0).pack() + ones,
    "seq": forged(seq=64, flags=1, entry_us=0xFFFFFFFF, shard=shard_of(1, 64)).pack() + ones,
    "seq-wrap": forged(seq=0xFFFFFFFF).pack() + ones,
    "shape": forged(first=1000 - 64 + 64 * 1000).pack() + ones,
    "shape-misaligned": forged(first=32).pack() + ones,
    "shape-ragged": forged(count=63).pack() + ones[:-4],
    "shape-shard": forged(shard=3).pack() + ones,
    "shape-empty-count": forged(flags=2).pack(),
    "shape-zero-count": forged(count=0).pack(),
    "shape-long": forged().pack() + ones + b"\0",
    "shape-overflow": forged(first=0xFFFFFFC0).pack() + ones,
    "shape-not-entered": forged(entry_us=0xFFFFFFFF).pack() + ones,
    "epoch": forged(epoch=1).pack() + ones,
    "epoch-life": forged(incarnation=1).pack() + ones,
    "owner": forged(shard=(forged().shard + 1) % 3).pack() + ones,
    "owner-gather": forged(flags=1).pack() + ones,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_rule_11_a_bad_datagram_is_counted_by_reason_and_dropped(name: str) -> None:
    scenario = Scenario(ranks=3, length=3000, compute_s=[[0.001] * 3], injections=[(0.0, 0, HOSTILE[name])])
    simulation = simulate(scenario)
    rejected = simulation.native.counters[0].rejected
    assert rejected.pop(name.split("-")[0]) == 1
    assert not any(rejected.values())
    for rank in range(3):
        assert simulation.reports(rank)[0].status == "complete"
        assert result(simulation, 0, rank) == mean_of(simulation, 0, range(3))


def test_rule_11_a_length_that_no_pool_can_hold_is_refused_without_an_allocation() -> None:
    huge = forged(bucket_len=0xFFFFFFFF).pack() + ones
    simulation = simulate(
        Scenario(ranks=3, length=3000, compute_s=[[0.001] * 3], injections=[(0.0, 0, huge)])
    )
    assert simulation.native.counters[0].rejected["pool"] == 1
    assert all(simulation.reports(rank)[0].status == "complete" for rank in range(3))


def test_rule_11_duplicates_are_counted_and_change_nothing() -> None:
    simulation = simulate(Scenario(ranks=3, length=5000, duplicate=1.0))
    assert (
        simulation.native.counters[0].rejected["duplicate"] + simulation.native.counters[0].rejected["late"]
        > 0
    )
    assert all(result(simulation, 0, rank) == mean_of(simulation, 0, range(3)) for rank in range(3))


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
@pytest.mark.parametrize("wrong", [0, 1, 1200, 3064])
def test_rule_11_the_majoritys_length_is_served_and_the_offender_gets_an_error(
    ranks: int, wrong: int
) -> None:
    for offender in range(ranks):
        simulation = simulate(
            Scenario(ranks=ranks, length=3000, ops=2, lengths={(0, offender): wrong}, seed=offender)
        )
        error, after = simulation.outcomes[offender]
        assert isinstance(error, ConfigError)
        assert f"rank {offender}" in str(error)
        assert str(wrong) in str(error)
        assert isinstance(after, Report)
        others = [rank for rank in range(ranks) if rank != offender]
        for rank in others:
            first, second = simulation.outcomes[rank]
            assert isinstance(first, Report)
            assert first.status == second.status == "complete"
            assert first.elapsed_s < SCATTER_S  # nobody waits for what the offender cannot deliver
            assert result(simulation, 0, rank) == mean_of(simulation, 0, others)
            assert result(simulation, 1, rank) == mean_of(simulation, 1, range(ranks))


@pytest.mark.parametrize("lengths", [(3000, 2999), (0, 1), (64, 0)])
def test_rule_11_two_ranks_that_disagree_both_get_an_error(lengths: tuple[int, int]) -> None:
    simulation = simulate(Scenario(ranks=2, ops=1, lengths={(0, 0): lengths[0], (0, 1): lengths[1]}))
    for rank in range(2):
        (error,) = simulation.outcomes[rank]
        assert isinstance(error, ConfigError)


def test_rule_11_without_a_majority_everybody_gets_an_error() -> None:
    simulation = simulate(Scenario(ranks=4, length=1000, lengths={(0, 2): 999, (0, 3): 999}))
    assert all(isinstance(simulation.outcomes[rank][0], ConfigError) for rank in range(4))


# ---- rule 12: the end --------------------------------------------------------------------------------------


def test_rule_12_close_lingers_until_the_peers_have_what_they_need() -> None:
    late = Scenario(
        ranks=3, length=4096, freezes=[Freeze(2, 0.0, 0.09)], record=True
    )  # the others finish without it
    simulation = simulate(late)
    oracle.check(simulation)
    (report,) = simulation.reports(2)
    assert lost(report, "gather") == (0, 0, 0)
    assert max(simulation.native.closed_at_ns) / 1e9 < 0.2


def test_rule_12_close_lingers_until_the_peers_have_said_goodbye() -> None:
    simulation = simulate(
        Scenario(ranks=3, length=4096, compute_s=[[0, 0, 0.09]])
    )  # the last one enters late
    assert [report.status for report in simulation.reports(0)] == ["complete"]
    assert min(simulation.native.closed_at_ns) / 1e9 >= 0.09


def test_rule_12_close_does_not_wait_for_ever() -> None:
    simulation = simulate(Scenario(ranks=3, length=100, freezes=[Freeze(2, 0.0, None)]))
    for rank in (0, 1):
        assert simulation.native.closed_at_ns[rank] / 1e9 <= 2 * DEADLINE_S + 1e-3


def test_rule_12_peers_that_all_say_goodbye_part_at_once() -> None:
    simulation = simulate(Scenario(ranks=4, length=1000))
    assert max(simulation.native.closed_at_ns) / 1e9 < 0.01


def test_rule_12_a_rank_that_has_left_is_not_waited_for() -> None:
    simulation = simulate(Scenario(ranks=4, length=4096, ops=5, ops_by_rank={3: 2}, record=True))
    for rank in range(3):
        for report in simulation.reports(rank)[2:]:
            assert report.status == "complete"
            assert report.elapsed_s < SCATTER_S
            assert empty(report)[3] == 1
            assert abstained(report) == (3,)


def test_rule_12_seq_raises_before_it_wraps() -> None:
    last = (1 << 32) - 1
    simulation = simulate(Scenario(ranks=2, length=100, ops=3, first_seq=last - 2))
    for rank in range(2):
        first, second, third = simulation.outcomes[rank]
        assert isinstance(first, Report)
        assert isinstance(second, Report)
        assert isinstance(third, ConfigError)
        assert "2**32" in str(third)


def test_rule_12_a_groups_tag_keeps_out_packets_of_an_earlier_life() -> None:
    old = forged(group_tag=group_tag(seed=12345)).pack() + ones
    simulation = simulate(Scenario(ranks=3, length=3000, injections=[(0.0, 0, old)] * 10))
    assert simulation.native.counters[0].rejected["group"] == 10


# ---- what the rules say together ---------------------------------------------------------------------------


def test_a_partition_ends_by_the_deadline_on_both_sides() -> None:
    simulation = simulate(
        Scenario(ranks=4, length=4096, ops=3, partitions=[Partition(0.0, 0.35, (0, 1))], record=True)
    )
    oracle.check_deadlines(simulation)
    oracle.check(simulation)
    assert simulation.reports(0)[0].missing_from == (2, 3)
    assert simulation.reports(2)[0].missing_from == (0, 1)


def test_thirty_percent_loss_ends_by_the_deadline() -> None:
    simulation = simulate(Scenario(ranks=8, length=50_000, ops=3, loss=0.3, record=True))
    oracle.check_deadlines(simulation)
    oracle.check(simulation)


def test_credit_never_overruns_a_socket_buffer() -> None:
    """Seven senders and a receiver that stands still for a moment, in the middle of a transfer."""
    for buffer_bytes in (1 << 17, 1 << 20):
        simulation = simulate(
            Scenario(
                ranks=8,
                length=200_000,
                freezes=[Freeze(0, 0.0005, 0.02)],
                socket_buffer_bytes=buffer_bytes,
                bytes_per_s=1e9,
            )
        )
        assert simulation.native.fates["socket_drop"] == 0
        assert all(result(simulation, 0, rank) == mean_of(simulation, 0, range(8)) for rank in range(8))


def test_lost_feedback_does_not_stop_the_flow() -> None:
    simulation = simulate(
        Scenario(
            ranks=2,
            length=100_000,
            loss=0.05,
            seed=3,
            socket_buffer_bytes=1 << 15,
            deadline_s=1.0,
            record=True,
        )
    )
    oracle.check(simulation)
    assert simulation.reports(0)[0].lost_frac < 0.15
