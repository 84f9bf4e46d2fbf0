"""Ring and tree over the reliable transport: right in a clean network, and honest in a bad one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tailcut import ConfigError, Freeze, Partition, _native
from tailcut.simulation import Baseline, simulate_baseline
from tailcut.simulation.network import Bursts, BurstyLoss, RateChange
from tests.tables import rows

RATE = 125e6  # 1 Gbit/s
WIRE = (1448 + 32 + 34) / 1448  # bytes on the wire per byte of payload
ACKS = (32 + 34) / 2 / 1448  # of the other direction, which shares the links


def baseline(algorithm: str = "ring", **changes: object) -> Baseline:
    plain = Baseline(
        algorithm=algorithm,
        ranks=4,
        bucket_bytes=4 << 20,
        ops=3,
        bytes_per_s=RATE,
        queue_bytes=1_000_000,
        frame_bytes=34,
        seed=1,
    )
    return dataclasses.replace(plain, **changes)


def durations_s(result: _native.BaselineResult) -> np.ndarray:
    ops = result.ops()
    return (ops["ended_at_ns"] - ops["entered_at_ns"]) / 1e9


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_takes_its_bound_in_a_clean_network(ranks: int) -> None:
    result = simulate_baseline(baseline(ranks=ranks))
    bound_s = 2 * (ranks - 1) / ranks * (4 << 20) * (WIRE + ACKS) / RATE
    assert len(result.ops()) == 3 * ranks
    assert np.median(durations_s(result)) == pytest.approx(bound_s, rel=0.05)
    assert durations_s(result).min() >= 0.98 * bound_s
    assert result.timeouts == 0


@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
def test_a_tree_ends_within_twice_its_bound_in_a_clean_network(ranks: int) -> None:
    result = simulate_baseline(baseline("tree", ranks=ranks, part_bytes=64 << 10))
    bound_s = 2 * (ranks - 1) / ranks * (4 << 20) * WIRE / RATE
    assert len(result.ops()) == 3 * ranks
    assert bound_s < np.median(durations_s(result)) < 2 * bound_s


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_every_byte_is_sent_once_if_nothing_is_lost(algorithm: str) -> None:
    result = simulate_baseline(baseline(algorithm, ops=1, queue_bytes=0, part_bytes=1448 * 100))
    payload = 2 * 3 * (4 << 20)  # both algorithms: 2(N-1) buckets in all
    assert (result.segments - result.resent_segments) * 1448 == pytest.approx(payload, rel=0.01)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("loss", [0.001, 0.01, 0.1])
def test_losses_are_repaired_and_every_op_ends(algorithm: str, loss: float) -> None:
    clean = simulate_baseline(baseline(algorithm))
    lossy = simulate_baseline(baseline(algorithm, loss=loss))
    assert len(lossy.ops()) == 12
    assert lossy.resent_segments > clean.resent_segments
    assert durations_s(lossy).mean() > durations_s(clean).mean()


def test_a_lost_segment_in_the_middle_costs_a_round_trip_and_not_a_timeout() -> None:
    result = simulate_baseline(baseline(loss=0.0005, ops=20))
    assert result.resent_segments > 10
    assert result.probes < result.resent_segments / 4
    assert result.timeouts == 0


def test_a_lost_end_is_found_by_a_probe_long_before_the_timeout() -> None:
    """One segment a message, and two ranks that wait for each other: nothing that comes after it tells."""
    small = baseline(ranks=2, bucket_bytes=2000, ops=400, loss=0.02)
    result = simulate_baseline(small)
    assert result.probes > 10
    # Two round trips and 2 ms, unless the probe is lost as well.
    assert np.percentile(durations_s(result), 98) < 0.01
    assert durations_s(result).max() < 0.25


def test_the_timeout_is_what_bounds_recovery_when_the_probe_is_lost_too() -> None:
    dark = baseline(bucket_bytes=40_000, ops=200, partitions=[Partition(0.02, 0.05, (1,))])
    slow = simulate_baseline(dark)
    quick = simulate_baseline(dataclasses.replace(dark, least_rto_s=0.01))
    assert slow.timeouts >= 1
    assert quick.timeouts >= 1
    assert 0.2 < durations_s(slow).max() < 0.3
    assert durations_s(quick).max() < 0.1


def test_a_timeout_that_was_wrong_does_not_shrink_the_window_for_long() -> None:
    """Everything is late by 300 ms and nothing is lost."""
    late = baseline(
        ops=30,
        queue_bytes=0,
        bursts=Bursts(volume_bytes=round(0.3 * RATE), gap_min_s=0.5, gap_mean_s=0.0, packet_bytes=9000),
    )
    result = simulate_baseline(late)
    assert result.timeouts > 0
    assert result.resent_segments < 0.1 * result.segments
    assert durations_s(result).max() < 0.1 + 0.3 + 0.3


def test_a_link_that_becomes_five_times_slower_slows_the_ring_and_recovers() -> None:
    changes = [RateChange(0.1, 1, downlink_factor=0.2), RateChange(0.5, 1)]
    ops = simulate_baseline(baseline(ops=20, rate_changes=changes)).ops()
    took_s: dict[str, list[int]] = {at: [] for at in ("before", "during", "after")}
    for entered_ns, ended_ns in ops[["entered_at_ns", "ended_at_ns"]].tolist():
        if ended_ns < 0.1e9:
            took_s["before"].append(ended_ns - entered_ns)
        elif 0.1e9 < entered_ns < ended_ns < 0.5e9:
            took_s["during"].append(ended_ns - entered_ns)
        elif entered_ns > 0.6e9:
            took_s["after"].append(ended_ns - entered_ns)
    before, during, after = (np.median(took_s[at]) for at in ("before", "during", "after"))
    assert 4 < during / before < 7
    assert after == pytest.approx(before, rel=0.1)


def test_a_process_that_stands_still_delays_everybody_and_costs_nobody_a_timeout() -> None:
    frozen = simulate_baseline(baseline(ops=10, freezes=[Freeze(1, 0.1, 0.4)]))
    assert len(frozen.ops()) == 40
    hit = [op.rank for op in rows(frozen.ops()) if op.entered_at_ns < 0.3e9 and op.ended_at_ns >= 0.4e9]
    assert sorted(hit) == [0, 1, 2, 3]
    assert durations_s(frozen).max() < 0.3 + 2 * 0.06
    assert frozen.timeouts == 0


def test_the_receive_buffer_caps_what_is_on_its_way() -> None:
    far = baseline(ranks=2, ops=2, bucket_bytes=1 << 20, delay_s=0.01, receive_buffer_bytes=64 << 10)
    at_least_s = (1 << 20) / (64 << 10) * 0.02  # a buffer for each round trip
    assert at_least_s < durations_s(simulate_baseline(far)).min() < 1.3 * at_least_s
    roomy = dataclasses.replace(far, receive_buffer_bytes=6 << 20)
    assert durations_s(simulate_baseline(roomy)).min() < 0.5 * at_least_s


def test_a_full_receive_buffer_stops_the_sender_until_it_is_read() -> None:
    """Without room for what the frozen rank does not read, its neighbour waits; nothing is lost for it."""
    tight = baseline(ops=5, freezes=[Freeze(1, 0.02, 0.4)], receive_buffer_bytes=64 << 10)
    result = simulate_baseline(tight)
    assert len(result.ops()) == 20
    assert result.network.fates["queue_drop"] == 0


def test_a_dead_rank_stops_the_group_for_ever() -> None:
    result = simulate_baseline(baseline(ops=10, freezes=[Freeze(2, 0.1, None)], give_up_s=5.0))
    ended = result.ops()
    assert 0 < len(ended) < 40
    assert ended["ended_at_ns"].max() < 0.2e9
    assert result.ended_at_ns >= 5e9


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_the_same_seed_gives_the_same_history(algorithm: str) -> None:
    faulty = baseline(
        algorithm, loss=0.01, jitter_s=1e-4, duplicate=0.01, bursty_loss=BurstyLoss(enter=0.001, leave=0.2)
    )
    first, second = simulate_baseline(faulty), simulate_baseline(faulty)
    assert np.array_equal(first.ops(), second.ops())
    assert first.events == second.events
    other = simulate_baseline(dataclasses.replace(faulty, seed=2))
    assert not np.array_equal(first.ops(), other.ops())


def test_ranks_enter_when_they_have_computed() -> None:
    compute_s = [[0.0] * 4, [0.01, 0.02, 0.03, 0.04]]
    ops = rows(simulate_baseline(baseline(ops=2, compute_s=compute_s)).ops())
    ended = {(op.rank, op.op): op.ended_at_ns for op in ops}
    entered = {(op.rank, op.op): op.entered_at_ns for op in ops}
    for rank in range(4):
        assert entered[rank, 1] - ended[rank, 0] == round(1e9 * compute_s[1][rank])


def test_progress_is_told_and_its_exception_ends_the_run() -> None:
    told: list[int] = []
    simulate_baseline(baseline(ops=40), told.append)
    assert told == sorted(told)
    assert len(told) > 3

    def stop(ended_ops: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate_baseline(baseline(ops=40), stop)


@pytest.mark.parametrize("broken", [{"algorithm": "star"}, {"ranks": 0}, {"part_bytes": 0}, {"loss": -1.0}])
def test_a_baseline_that_makes_no_sense_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        baseline(**broken)
