"""The simulated network alone: what becomes of packets, and when, to the nanosecond."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tailcut import ConfigError, Partition, _native
from tailcut.simulation.network import Bursts, BurstyLoss, Machine, RateChange, SimulatedNetwork, Wan
from tests.tables import rows

US, MS = 1_000, 1_000_000
Send = tuple[int, int, list[int], int]  # at_ns, source, destinations, bytes


def carry(network: SimulatedNetwork, sends: list[Send], hosts: int = 4) -> list[Any]:
    """In the order of ending; a packet that was dropped arrived at -1."""
    spec = _native.NetworkSpec()
    network.check_network()
    network.fill(spec)
    return rows(_native.carry(spec, hosts, sends))


def times(network: SimulatedNetwork, sends: list[Send], hosts: int = 4) -> list[int]:
    """By number: when it arrived, or -1."""
    return [packet.at_ns for packet in sorted(carry(network, sends, hosts), key=lambda packet: packet.number)]


MEGABYTE_PER_S = SimulatedNetwork(bytes_per_s=1e6, delay_s=10e-6)  # a byte takes 1 µs


def test_a_packet_takes_its_time_on_both_links_and_the_delay_between() -> None:
    assert times(MEGABYTE_PER_S, [(0, 0, [1], 1000)]) == [1000 * US + 10 * US + 1000 * US]


def test_a_nic_sends_one_packet_after_the_other_whoever_they_are_for() -> None:
    assert times(MEGABYTE_PER_S, [(0, 0, [1], 1000), (0, 0, [2], 500)]) == [2010 * US, 2010 * US]
    faster_uplink = dataclasses.replace(MEGABYTE_PER_S, uplink_bytes_per_s=0.0)
    assert times(faster_uplink, [(0, 0, [1], 1000), (0, 0, [2], 500)]) == [1010 * US, 510 * US]


def test_packets_of_two_sources_queue_at_the_port_of_their_destination() -> None:
    assert times(MEGABYTE_PER_S, [(0, 0, [2], 1000), (0, 1, [2], 1000)]) == [2010 * US, 3010 * US]


def test_frames_cost_bytes_on_links_and_in_queues() -> None:
    framed = dataclasses.replace(MEGABYTE_PER_S, frame_bytes=42)
    assert times(framed, [(0, 0, [1], 1000)]) == [2 * 1042 * US + 10 * US]
    full = dataclasses.replace(framed, queue_bytes=1041)
    assert times(full, [(0, 0, [1], 1000)]) == [-1]


@pytest.mark.parametrize(("queue_bytes", "arrived"), [(3000, 3), (2999, 2)])
def test_a_port_drops_what_its_queue_does_not_hold(queue_bytes: int, arrived: int) -> None:
    shallow = dataclasses.replace(MEGABYTE_PER_S, queue_bytes=queue_bytes, uplink_bytes_per_s=0.0)
    at = times(shallow, [(0, source, [3], 1000) for source in range(3)])
    assert sum(t > 0 for t in at) == arrived


def test_a_multicast_packet_leaves_its_nic_once_and_reaches_every_port() -> None:
    packets = carry(MEGABYTE_PER_S, [(0, 0, [1, 2, 3], 1000)])
    assert sorted((packet.destination, packet.at_ns) for packet in packets) == [
        (host, 2010 * US) for host in (1, 2, 3)
    ]


def test_a_link_becomes_five_times_slower_and_recovers() -> None:
    slow = dataclasses.replace(
        MEGABYTE_PER_S,
        delay_s=0.0,
        uplink_bytes_per_s=0.0,
        rate_changes=[RateChange(0.0005, 1, downlink_factor=0.2), RateChange(0.003, 1)],
    )
    # 500 bytes by 0.5 ms, 500 more in the 2.5 ms at a fifth: exactly at the recovery; then at full rate.
    assert times(slow, [(0, 0, [1], 1000), (0, 0, [1], 1000)]) == [3 * MS, 4 * MS]
    assert times(slow, [(0, 0, [2], 1000)]) == [MS]
    early = dataclasses.replace(slow, rate_changes=[RateChange(0.0, None, downlink_factor=0.5)])
    assert times(early, [(0, 0, [3], 1000)]) == [2 * MS]


def test_the_queue_of_a_slowed_port_is_counted_in_bytes() -> None:
    slow = dataclasses.replace(
        MEGABYTE_PER_S,
        delay_s=0.0,
        uplink_bytes_per_s=0.0,
        queue_bytes=2000,
        rate_changes=[RateChange(0.0005, None, downlink_factor=0.1)],
    )
    # At 1.5 ms there are 900 bytes left, of the 1500 that came at once: 500 and 100 are carried.
    assert times(slow, [(0, 0, [1], 1500), (1500 * US, 0, [1], 1100)])[1] > 0
    assert times(slow, [(0, 0, [1], 1500), (1500 * US, 0, [1], 1101)])[1] == -1


def test_what_a_switch_trims_is_shorter_and_goes_first() -> None:
    crowded = dataclasses.replace(
        MEGABYTE_PER_S, delay_s=0.0, uplink_bytes_per_s=0.0, trim_above_bytes=2500, trim_to_bytes=200
    )
    packets = carry(crowded, [(0, source, [3], 1000) for source in range(3)])
    by_number = {packet.number: (packet.bytes, packet.at_ns) for packet in packets}
    assert by_number == {0: (1000, MS), 1: (1000, 2 * MS), 2: (200, 200 * US)}


def test_small_packets_are_not_trimmed() -> None:
    always = SimulatedNetwork(trim=1.0, trim_to_bytes=200)
    assert [packet.bytes for packet in carry(always, [(0, 0, [1], 200), (0, 0, [1], 201)])] == [200, 200]
    assert [packet.bytes for packet in carry(always, [(0, 0, [1], 100)])] == [100]


def test_loss_is_as_frequent_as_stated() -> None:
    sends = [(k * US, 0, [1], 100) for k in range(20_000)]
    lost = np.mean(np.array(times(SimulatedNetwork(loss=0.02, seed=1), sends)) < 0)
    assert 0.017 < lost < 0.023


def test_bursty_loss_comes_in_runs() -> None:
    sends = [(k * US, 0, [1], 100) for k in range(40_000)]
    bursty = BurstyLoss(enter=0.005, leave=0.25)
    lost = np.array(times(SimulatedNetwork(bursty_loss=bursty, seed=1), sends)) < 0
    runs = np.count_nonzero(np.diff(lost.astype(int)) == 1)
    assert 0.015 < lost.mean() < 0.025  # 0.005 / 0.255
    assert 3.4 < lost.sum() / runs < 4.6  # 1 / leave


def test_a_wan_adds_its_rate_its_delay_and_its_queue_between_sites_only() -> None:
    wan = Wan(second_site=2, bytes_per_s=1e5, delay_s=0.01, queue_bytes=1500)
    network = SimulatedNetwork(delay_s=0.0, wan=wan)
    at = times(network, [(0, 0, [1], 1000), (0, 0, [2], 1000), (0, 3, [1], 500), (0, 1, [3], 501)])
    assert at == [0, 20 * MS, 15 * MS, -1]


def test_partitions_cut_both_ways_and_end() -> None:
    network = SimulatedNetwork(delay_s=0.0, partitions=[Partition(0.001, 0.002, (1,))])
    sends = [(at, 0, [1], 100) for at in (0, MS, 2 * MS)] + [(MS, 1, [0], 100), (MS, 2, [3], 100)]
    assert times(network, sends) == [0, -1, 2 * MS, -1, MS]


def test_a_token_bucket_lets_some_bytes_pass_at_once_after_a_pause() -> None:
    machine = Machine(cores=1, packet_cost_s=0.0, bucket_bytes=1500)
    network = dataclasses.replace(MEGABYTE_PER_S, delay_s=0.0, uplink_bytes_per_s=0.0, machine=machine)
    sends = [(10 * MS, 0, [1], 1000)] * 3
    assert times(network, sends) == [10 * MS, 10_500 * US, 11_500 * US]
    # Half of the bucket is full again 0.75 ms after the last packet has left.
    assert times(network, [*sends, (12_250 * US, 0, [1], 1000)])[3] == 12_500 * US
    assert times(network, [*sends, (14_000 * US, 0, [1], 1000)])[3] == 14_000 * US


def test_hosts_of_one_machine_share_its_cores() -> None:
    def arrivals(cores: int) -> list[int]:
        machine = Machine(cores=cores, packet_cost_s=30e-6, bucket_bytes=0)
        network = SimulatedNetwork(delay_s=10e-6, machine=machine)
        return times(network, [(0, host, [3 - host], 1000) for host in range(4)] * 2)

    assert arrivals(1) == [US * (10 + 30 * k) for k in range(1, 9)]
    assert arrivals(2) == [US * (10 + 30 * k) for k in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert arrivals(8) == [40 * US] * 8


def test_bursts_take_turns_with_the_traffic_of_a_port() -> None:
    bursts = Bursts(volume_bytes=3000, gap_min_s=0.001, gap_mean_s=0.0)
    network = dataclasses.replace(MEGABYTE_PER_S, delay_s=0.0, uplink_bytes_per_s=0.0, bursts=bursts)
    assert times(network, [(990 * US, 0, [1], 100)]) == [1090 * US]
    assert times(network, [(1010 * US, 0, [1], 100)]) == [4100 * US]
    trickle = dataclasses.replace(bursts, bytes_per_s=1e6, packet_bytes=1000)
    network = dataclasses.replace(network, bursts=trickle)
    assert times(network, [(1010 * US, 0, [1], 100)]) == [2100 * US]


def test_bursts_are_dropped_too_when_a_queue_is_full() -> None:
    bursts = Bursts(volume_bytes=3000, gap_min_s=0.001, gap_mean_s=0.0, packet_bytes=1000)
    network = dataclasses.replace(
        MEGABYTE_PER_S, delay_s=0.0, uplink_bytes_per_s=0.0, queue_bytes=2000, bursts=bursts
    )
    # Two of three fit; 0.5 ms later 500 bytes of them are gone.
    assert times(network, [(1500 * US, 0, [1], 500)]) == [3500 * US]
    assert times(network, [(1500 * US, 0, [1], 501)]) == [-1]


@pytest.mark.parametrize("ratio", [1.5, 3.0])
def test_bursts_give_a_lone_message_the_tail_that_is_promised(ratio: float) -> None:
    """A message of 1 MB after the other, in packets; bursts as tail-1.5 and tail-3 have them."""
    message_bytes, packet_bytes, rate = 1_000_000, 10_000, 25e6
    took_ns = []
    bursts = Bursts(
        volume_bytes=round((ratio - 1) * message_bytes),
        gap_min_s=0.4,
        gap_mean_s=0.6,
        packet_bytes=packet_bytes,
    )
    network = SimulatedNetwork(bytes_per_s=rate, queue_bytes=8_000_000, bursts=bursts, seed=3)
    for start in range(0, 300 * 160 * MS, 160 * MS):  # messages far enough apart that they do not meet
        sends = [(start, 0, [1], packet_bytes)] * (message_bytes // packet_bytes)
        took_ns += [sends]
    at = times(network, [send for sends in took_ns for send in sends], hosts=2)
    last = np.array(at).reshape(300, -1)[:, -1] - np.arange(300) * 160 * MS
    p50, p99 = np.percentile(last, [50, 99], method="inverted_cdf")
    assert p99 / p50 == pytest.approx(ratio, rel=0.1)


def test_burst_times_depend_on_the_seed_and_not_on_the_traffic() -> None:
    bursts = Bursts(volume_bytes=100_000, gap_min_s=0.001, gap_mean_s=0.002)
    network = dataclasses.replace(MEGABYTE_PER_S, bytes_per_s=1e9, bursts=bursts, loss=0.1, seed=5)
    probes = [(k * 50 * US, 0, [1], 100) for k in range(200)]
    alone = times(network, probes)
    assert alone == times(network, probes)
    assert alone != times(dataclasses.replace(network, seed=6), probes)
    quiet = dataclasses.replace(network, loss=0.0)
    crowd = [(k * 50 * US, 2, [3], 100) for k in range(200)]
    assert times(quiet, probes) == times(quiet, probes + crowd)[:200]


@pytest.mark.parametrize(
    "broken",
    [
        {"loss": 1.5},
        {"trim_to_bytes": 48},
        {"rate_changes": [RateChange(0.0, None, uplink_factor=0.0)]},
        {"bursts": Bursts(volume_bytes=1, gap_min_s=0.0, gap_mean_s=1.0)},
        {"machine": Machine(cores=0, packet_cost_s=1e-6, bucket_bytes=0)},
    ],
)
def test_a_network_that_makes_no_sense_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SimulatedNetwork(**broken).check_network()
