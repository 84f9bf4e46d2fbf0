"""What the pace must do, on simulated networks; and its controller alone, at a bottleneck that changes."""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np
import pytest

from tailcut import Freeze, Scenario, Simulation, _native, simulate

MTU_PAYLOADS = {1500: 1408, 9000: 8704}


def paced(
    ranks: int,
    mbit_s: float,
    delay_s: float,
    queue_bytes: int,
    mtu: int = 1500,
    op_s: float = 0.2,
    jitter_s: float = 0.0,
    loss: float = 0.0,
) -> tuple[Simulation, float]:
    """Four buckets that take ``op_s`` at the full rate, and that time, with headers."""
    payload, bytes_per_s = MTU_PAYLOADS[mtu], mbit_s * 1e6 / 8
    share = 2 * (ranks - 1) / ranks * (payload + _native.HEADER_BYTES) / payload
    length = round(op_s * bytes_per_s / share / 4)
    scenario = Scenario(
        ranks=ranks,
        length=length,
        ops=4,
        seed=1,
        deadline_s=60.0,
        loss=loss,
        delay_s=delay_s,
        jitter_s=jitter_s,
        bytes_per_s=bytes_per_s,
        queue_bytes=queue_bytes,
        socket_buffer_bytes=8 << 20,
        pool_bytes=1 << 28,
        packet_bytes=payload,
        paced=True,
    )
    return simulate(scenario), op_s + 2 * delay_s


def times_s(simulation: Simulation) -> np.ndarray:
    """Of each op, on the slowest rank."""
    ranks = range(simulation.scenario.ranks)
    return np.max([[report.elapsed_s for report in simulation.reports(rank)] for rank in ranks], axis=0)


def overflow_frac(simulation: Simulation) -> float:
    return simulation.native.fates["queue_drop"] / sum(
        c.traffic.sent_packets for c in simulation.native.counters
    )


NETWORKS = [
    # ranks, Mbit/s, delay, queue, MTU, seconds per op
    (2, 10, 20e-6, 50_000, 1500, 0.4),
    (2, 50, 10e-3, 250_000, 1500, 1.2),
    (2, 200, 200e-6, 50_000, 1500, 0.2),
    (2, 200, 20e-3, 8_000_000, 1500, 1.0),
    (2, 10_000, 20e-6, 250_000, 9000, 0.02),
    (4, 10, 200e-6, 250_000, 1500, 1.0),
    (4, 50, 200e-6, 250_000, 1500, 0.4),
    (4, 50, 10e-3, 8_000_000, 1500, 1.2),
    (4, 200, 100e-6, 8_000_000, 1500, 0.4),
    (4, 1000, 200e-6, 250_000, 1500, 0.1),
    (4, 1000, 200e-6, 8_000_000, 9000, 0.1),
    (9, 200, 100e-6, 150_000, 1500, 0.4),
    (9, 200, 2e-3, 250_000, 1500, 0.4),
]


@pytest.mark.parametrize(("ranks", "mbit_s", "delay_s", "queue_bytes", "mtu", "op_s"), NETWORKS)
def test_after_two_buckets_the_links_are_full_and_nothing_overflows(
    ranks: int, mbit_s: float, delay_s: float, queue_bytes: int, mtu: int, op_s: float
) -> None:
    simulation, ideal_s = paced(ranks, mbit_s, delay_s, queue_bytes, mtu, op_s)
    assert times_s(simulation)[2:].max() <= ideal_s / 0.9
    assert overflow_frac(simulation) <= 0.005
    counters = simulation.native.counters
    feedback_bytes = sum(c.feedback_bytes + 28 * c.feedback_packets for c in counters)
    assert feedback_bytes <= 0.02 * sum(c.traffic.sent_bytes for c in counters)


@pytest.mark.parametrize(("ranks", "queue_bytes"), [(4, 250_000), (9, 150_000), (9, 8_000_000)])
def test_senders_into_one_receiver_have_equal_shares(ranks: int, queue_bytes: int) -> None:
    simulation, _ = paced(ranks, 200, 100e-6, queue_bytes, op_s=0.5)
    for rank in range(ranks):
        for report in simulation.reports(rank)[2:]:
            # Contributions are equally long: who is through first had the largest share.
            ended_s = [link.scatter.last_s for link in report.links if link.scatter.last_s]
            assert min(ended_s) >= 0.8 * max(ended_s)


def test_a_lossy_link_is_not_a_full_one() -> None:
    simulation, ideal_s = paced(4, 200, 100e-6, 8_000_000, op_s=0.4, loss=0.01)
    assert times_s(simulation)[1:].max() <= ideal_s / 0.9


def test_hosts_that_are_late_by_a_part_of_a_millisecond_do_not_look_like_a_queue() -> None:
    simulation, ideal_s = paced(2, 200, 100e-6, 250_000, jitter_s=100e-6)
    assert times_s(simulation)[1:].max() <= ideal_s / 0.9


# ---- the controller alone ---------------------------------------------------------------------------------

PACKET = 1456
MS = 1_000_000


class Bottleneck:
    """One sender that always has data, a queue in front of a link, and a FEEDBACK for every 8 packets."""

    def __init__(self, bytes_per_s: float, queue_bytes: int, delay_ns: int = 200_000) -> None:
        self.rate = _native.RateControl(PACKET, 1)
        self.bytes_per_s = bytes_per_s
        self._queue_bytes, self._delay_ns = queue_bytes, delay_ns
        self._events: list[tuple[int, int, tuple[int, int, int, int]]] = []
        self._order = count()
        self._now_ns = self._due_ns = self._free_ns = self._flying = self._told_ns = 0
        self._group: list[tuple[int, int]] = []  # (arrival, delay) of packets not yet told
        self._lost = 0
        self.delivered_bytes = self.lost_bytes = 0

    def run(self, for_s: float) -> float:
        """Bytes/s delivered meanwhile."""
        until_ns, before = self._now_ns + round(for_s * 1e9), self.delivered_bytes
        while self._now_ns < until_ns:
            self._now_ns = max(self._now_ns, self._due_ns)
            while self._events and (
                self._events[0][0] <= self._now_ns
                or self._flying >= self.rate.most_in_flight(self._now_ns, deaf=False)
            ):
                at_ns, _, (rtt_ns, delay_ns, span_ns, told) = heapq.heappop(self._events)
                self._now_ns = max(self._now_ns, at_ns)
                self._flying -= told * PACKET + self._lost
                self.rate.limited()
                self.rate.learn(self._now_ns, rtt_ns, delay_ns, span_ns, told * PACKET, self._lost)
                self._lost = 0
            self._send()
        return (self.delivered_bytes - before) / for_s

    def _send(self) -> None:
        self._due_ns = self._now_ns + round(PACKET / self.rate.bytes_per_s * 1e9)
        self._flying += PACKET
        wait_ns = max(0, self._free_ns - self._now_ns)
        if wait_ns * self.bytes_per_s / 1e9 > self._queue_bytes:
            self._lost += PACKET
            self.lost_bytes += PACKET
            return
        self._free_ns = self._now_ns + wait_ns + round(PACKET / self.bytes_per_s * 1e9)
        self.delivered_bytes += PACKET
        arrival_ns = self._free_ns + self._delay_ns
        self._group.append((arrival_ns, arrival_ns - self._now_ns))
        if len(self._group) == 8:
            told = (
                self._group[-1][1] + self._delay_ns,
                min(delay_ns for _, delay_ns in self._group),
                arrival_ns - self._told_ns if self._told_ns else 0,
                len(self._group),
            )
            heapq.heappush(self._events, (arrival_ns + self._delay_ns, next(self._order), told))
            self._told_ns, self._group = arrival_ns, []


@pytest.mark.parametrize(("before", "after"), [(2.5e6, 25e6), (25e6, 2.5e6)])
def test_a_tenfold_change_of_rate_is_followed_within_half_a_second(before: float, after: float) -> None:
    bottleneck = Bottleneck(before, queue_bytes=1_000_000)
    bottleneck.run(1.0)
    bottleneck.bytes_per_s = after
    bottleneck.run(0.5)
    lost_before = bottleneck.lost_bytes
    assert bottleneck.run(1.0) >= 0.9 * after
    assert bottleneck.lost_bytes - lost_before <= 0.005 * after


def test_a_full_queue_of_the_own_host_lowers_the_rate_once_in_a_round_trip() -> None:
    bottleneck = Bottleneck(25e6, queue_bytes=1_000_000)
    bottleneck.run(0.5)
    rate, now_ns = bottleneck.rate, 1000 * MS
    before = rate.bytes_per_s
    rate.push_back(now_ns)
    rate.push_back(now_ns + 1)
    assert rate.bytes_per_s == pytest.approx(0.9 * before)


def test_a_feedback_covers_all_that_is_in_flight() -> None:
    """A rank that stood still answers thousands of datagrams at once; what it lacks of them is sent again."""
    simulation = simulate(
        Scenario(
            ranks=2,
            length=2_000_000,
            elided=True,
            deadline_s=1.0,
            delay_s=50e-6,
            loss=0.02,
            socket_buffer_bytes=64 << 20,
            freezes=[Freeze(rank=1, from_s=10e-6, until_s=0.02)],
        )
    )
    for rank in range(2):
        (report,) = simulation.reports(rank)
        assert report.status == "complete"
        assert report.elapsed_s < 0.1
        assert simulation.native.counters[rank].traffic.resent_packets > 100
