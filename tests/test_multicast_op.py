"""Means by multicast: one datagram for all that hear it, unicast for the rest. Simulated, and on sockets."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tailcut import Freeze, Partition, Scenario, Simulation, _native, simulate
from tailcut.simulation.network import RateChange
from tailcut.tools.testbed import HostScenario
from tailcut.tools.testbed import Testbed as Bed
from tests import oracle
from tests.groups import allreduce, open_groups, vectors
from tests.netns import needs_root
from tests.reports import lost
from tests.tables import rows
from tests.test_rules import group_tag

LIMIT_S = 60
"""Only a hang takes longer."""
MULTICAST, GATHER, EMPTY, REPLY_WANTED = 32, 1, 2, 8


def bits(simulation: Simulation, op: int = 0) -> list[bytes]:
    return [result.tobytes() for result in simulation.results[op]]


def both(**scenario) -> tuple[Simulation, Simulation]:
    """By unicast and by multicast."""
    unicast, multicast = (simulate(Scenario(**scenario, multicast=on)) for on in (False, True))
    return unicast, multicast


def gather_runs(simulation: Simulation) -> Counter[tuple[int, ...]]:
    """How often each packet of a mean came: (source, destination, seq, first)."""
    return Counter(
        (packet.source, packet.destination, packet.seq, packet.first)
        for packet in rows(simulation.native.deliveries())
        if packet.gather
    )


# ---- who gets what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "planes"])
@pytest.mark.parametrize("paced", [False, True])
def test_the_result_is_that_of_unicast_bit_for_bit(codec: str, paced: bool) -> None:
    unicast, multicast = both(ranks=5, length=100_000, ops=3, depth=2, codec=codec, paced=paced, record=True)
    oracle.check(multicast)
    for op in range(3):
        assert bits(multicast, op) == bits(unicast, op)
    assert all(counters.traffic.multicast_packets > 0 for counters in multicast.native.counters)
    assert set(gather_runs(multicast).values()) == {1}


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_a_mean_leaves_its_owner_once(ranks: int) -> None:
    length = 6400 * ranks
    unicast, multicast = both(ranks=ranks, length=length, packet_bytes=1280)
    packets = 6400 * 4 // 1280
    mean_bytes = 6400 * 4 + packets * _native.HEADER_BYTES
    for rank in range(ranks):
        by_unicast, by_multicast = unicast.reports(rank)[0], multicast.reports(rank)[0]
        assert by_multicast.traffic.multicast_packets == packets
        assert by_unicast.traffic.sent_bytes - by_multicast.traffic.sent_bytes == (ranks - 2) * mean_bytes


def test_who_does_not_hear_it_is_served_by_unicast() -> None:
    scenario = Scenario(ranks=5, length=64_000, ops=2, multicast=True, deaf=(1, 4), record=True)
    simulation = simulate(scenario)
    oracle.check(simulation)
    for op in range(2):
        assert len(set(bits(simulation, op))) == 1
    assert set(gather_runs(simulation).values()) == {1}
    packets = -(-64_000 // 5 * 4 // 1280)
    for rank in range(5):
        for report in simulation.reports(rank):
            assert report.status == "complete"
            assert report.traffic.multicast_packets == packets
            deaf = 2 - (rank in (1, 4))
            # contributions, the mean, and once more
            assert report.traffic.sent_packets == packets * (4 + 1 + deaf)


def test_more_than_256_members_are_served_too() -> None:
    simulation = simulate(Scenario(ranks=260, length=260 * 64, multicast=True))
    expected = oracle.rank_order_mean(simulation.inputs[0]).tobytes()
    assert set(bits(simulation)) == {expected}
    assert simulation.native.counters[0].traffic.multicast_packets == 1


def test_hosts_with_little_uplink_gather_as_many_times_faster_as_there_are_receivers() -> None:
    """GATHER of N - 1 shards through an uplink takes as long as one."""
    ranks, ops = 5, 5
    common = {"ranks": ranks, "length": 500_000, "ops": ops, "paced": True, "deadline_s": 5.0}
    unicast, multicast = both(**common, bytes_per_s=125e6, uplink_bytes_per_s=25e6, delay_s=2e-5)
    shard_s = 4 * 500_000 / ranks / 25e6 * (1280 + _native.HEADER_BYTES) / 1280
    scatter_s = (ranks - 1) * shard_s
    slow, fast = (
        np.median([max(s.reports(r)[op].elapsed_s for r in range(ranks)) for op in range(ops)])
        for s in (unicast, multicast)
    )
    assert slow > 2 * scatter_s
    assert fast - scatter_s < (slow - scatter_s) / (0.6 * (ranks - 1))


# ---- loss, slow and dead members ---------------------------------------------------------------------------


def test_what_one_member_lost_is_sent_again_to_it_alone() -> None:
    """Rank 3 is cut off for a moment."""
    simulation = simulate(
        Scenario(
            ranks=4,
            length=400_000,
            deadline_s=1.0,
            bytes_per_s=125e6,
            partitions=[Partition(0.013, 0.014, (3,))],
            multicast=True,
            record=True,
        )
    )
    oracle.check(simulation)
    assert len(set(bits(simulation))) == 1
    assert all(simulation.reports(rank)[0].status == "complete" for rank in range(4))
    counters = simulation.native.counters
    assert sum(c.traffic.resent_packets for c in counters) > 10
    assert set(gather_runs(simulation).values()) == {1}  # nobody else got it twice
    sent = sum(c.traffic.multicast_packets for c in counters)
    assert sent == sum(-(-100_000 * 4 // 1280) for _ in range(4))  # nor was it multicast again


def test_random_loss_is_repaired() -> None:
    simulation = simulate(
        Scenario(ranks=5, length=200_000, ops=3, deadline_s=2.0, loss=0.02, multicast=True, record=True)
    )
    oracle.check(simulation)
    for op in range(3):
        assert len(set(bits(simulation, op))) == 1
    assert sum(c.traffic.resent_packets for c in simulation.native.counters) > 50


def test_a_slow_member_is_moved_to_unicast_and_the_others_keep_their_speed() -> None:
    """Rank 4 receives ten times slower than the others. Once that is known, means reach the others as fast as
    they are made; at its pace they would take 50 ms and more."""
    ops = 16
    simulation = simulate(
        Scenario(
            ranks=5,
            length=800_000,
            ops=ops,
            deadline_s=1.0,
            paced=True,
            multicast=True,
            bytes_per_s=125e6,
            delay_s=2e-5,
            queue_bytes=400_000,
            socket_buffer_bytes=1 << 24,
            rate_changes=[RateChange(0.0, 4, 1.0, 0.1)],
        )
    )
    assert simulation.native.counters[4].rejected["duplicate"] > 1000  # it hears what it is sent by unicast

    def lag_s(op: int) -> float:
        """From the close of an owner's shard until the last of it is at a fast rank."""
        natives = [simulation.native.reports[rank][op] for rank in range(4)]
        return max(
            (natives[rank].entered_at - natives[owner].closed_at) / 1e9
            + natives[rank].links[owner].gather.last_s
            for rank in range(4)
            for owner in range(4)
            if owner != rank
        )

    assert np.median([lag_s(op) for op in range(ops // 2, ops)]) < 0.01
    assert all(r.gather.missing == 0 for rank in range(4) for r in simulation.reports(rank))


def test_members_of_like_speed_stay_together() -> None:
    simulation = simulate(
        Scenario(
            ranks=5,
            length=400_000,
            ops=20,
            deadline_s=1.0,
            paced=True,
            multicast=True,
            bytes_per_s=125e6,
            delay_s=2e-5,
            jitter_s=2e-5,
            queue_bytes=400_000,
        )
    )
    assert sum(counters.rejected["duplicate"] for counters in simulation.native.counters) == 0


@pytest.mark.parametrize("paced", [False, True])
def test_a_dead_member_does_not_stall_the_others(paced: bool) -> None:
    """It is waited for a moment, no longer."""
    simulation = simulate(
        Scenario(
            ranks=4,
            length=800_000,
            ops=6,
            deadline_s=0.4,
            paced=paced,
            multicast=True,
            bytes_per_s=125e6,
            freezes=[Freeze(3, 0.0, None)],
            record=True,
        )
    )
    oracle.check(simulation)
    for rank in range(3):
        for op, report in enumerate(simulation.reports(rank)):
            assert lost(report, "gather") == (0, 0, 0, 1)
            last_s = max(link.gather.last_s for link in report.links if link.gather.last_s is not None)
            assert last_s - (report.scatter.ended_s or 0.0) < (0.08 if op == 0 else 0.02)


def test_a_member_that_was_frozen_is_a_member_again() -> None:
    ops = 40
    simulation = simulate(
        Scenario(
            ranks=4,
            length=64_000,
            ops=ops,
            deadline_s=0.1,
            multicast=True,
            compute_s=[[0.005] * 4] * ops,
            freezes=[Freeze(3, 0.05, 0.25)],
            record=True,
        )
    )
    oracle.check(simulation)
    packets = -(-16_000 * 4 // 1280)
    for rank in range(3):
        report = simulation.reports(rank)[-1]
        assert report.status == "complete"
        assert report.traffic.sent_packets == packets * (3 + 1)


# ---- a hostile network -------------------------------------------------------------------------------------


def forged(**fields: int) -> bytes:
    header = _native.Header()
    header.group_tag, header.source, header.stamp_us, header.bucket_len = group_tag(0), 1, 1, 3000
    for name, value in fields.items():
        setattr(header, name, value)
    return header.pack()


def run_with(*datagrams: bytes) -> Simulation:
    """Rank 0 of three is handed them before anybody enters, and when the means are on their way."""
    return simulate(
        Scenario(
            ranks=3,
            length=3000,
            ops=2,
            multicast=True,
            compute_s=[[0.001] * 3] * 2,
            injections=[(at_s, 0, d) for at_s in (0.0, 0.001025) for d in datagrams],
        )
    )


def shard_of(owner: int) -> int:
    return next(shard for shard in range(3) if _native.owner_of(shard, 0, 3, 0) == owner)


@pytest.mark.parametrize(
    ("datagram", "reason"),
    [
        (forged(type=1, flags=MULTICAST | EMPTY, shard=shard_of(0), entry_us=1), "shape"),  # a contribution
        (forged(type=1, flags=MULTICAST | GATHER | EMPTY, shard=shard_of(2)), "owner"),
        (forged(type=1, flags=MULTICAST | GATHER | EMPTY, shard=shard_of(0)), "owner"),
        (forged(type=3, flags=MULTICAST, seq=0), "type"),
        (forged(type=2, flags=MULTICAST, source=3), "source"),
    ],
)
def test_multicast_of_what_is_not_the_sources_own_mean_is_refused(datagram: bytes, reason: str) -> None:
    simulation = run_with(datagram)
    assert simulation.native.counters[0].rejected[reason] == 2
    assert set(bits(simulation)) == {oracle.rank_order_mean(simulation.inputs[0]).tobytes()}


@pytest.mark.parametrize("latest", [0, 1, 2, 500, 0x7FFF, 0x8000, 0xFFFF])
def test_numbers_that_were_never_sent_change_nothing(latest: int) -> None:
    feedback = forged(
        type=2, flags=MULTICAST | REPLY_WANTED, latest=latest, number=latest, echo_us=1, arrival_us=1
    )
    simulation = run_with(feedback, feedback + bytes(64))
    for op in range(2):
        expected = oracle.rank_order_mean(simulation.inputs[op]).tobytes()
        assert set(bits(simulation, op)) == {expected}


# ---- real sockets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"codec": "planes"}, {"lanes": 2}, {"offload": False}])
def test_over_loopback_the_result_is_that_of_unicast_bit_for_bit(tmp_path: Path, config: dict) -> None:
    ranks, length = 4, 300_000
    results: dict[str, list[bytes]] = {}
    for mode in ("off", "on"):
        with open_groups(tmp_path / mode, ranks, multicast=mode, deadline_s=20.0, **config) as groups:
            results[mode] = []
            for op in range(4):
                arrays = vectors(ranks, length, seed=op)
                reports = allreduce(groups, arrays)
                assert {report.status for report in reports} == {"complete"}
                assert len({array.tobytes() for array in arrays}) == 1
                results[mode].append(arrays[0].tobytes())
        assert all((group.stats().traffic.multicast_packets > 0) == (mode == "on") for group in groups)
    assert results["on"] == results["off"]


WORKER = """
import hashlib, sys
from tailcut import Config, FileStore, Group
import numpy as np

rank, ranks, directory, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
config = Config(rendezvous_s=30, deadline_s=20.0, multicast=mode, adaptive=False, planes=16)
digest, sent, packets, resent = hashlib.sha256(), 0, 0, 0
with Group(rank, ranks, FileStore(directory), config) as group:
    for op in range(5):
        array = np.random.default_rng((op, rank)).standard_normal(200_000, np.float32)
        report = group.allreduce(array).wait()
        assert report.status == "complete", report
        digest.update(array.tobytes())
        packets += report.traffic.multicast_packets
        sent += report.traffic.sent_packets
        resent += report.traffic.resent_packets
print(digest.hexdigest(), packets, sent, resent, flush=True)
"""


@needs_root
def test_between_hosts_the_result_is_that_of_unicast_bit_for_bit(tmp_path: Path) -> None:
    ranks = 4
    digests, sent = set(), {}
    with Bed.up(HostScenario(name="multicast", hosts=ranks)) as testbed:
        for mode in ("off", "on"):
            command = [sys.executable, "-c", WORKER]
            workers = [
                testbed.spawn(
                    rank, [*command, *map(str, (rank, ranks, tmp_path / mode, mode))], stdout=subprocess.PIPE
                )
                for rank in range(ranks)
            ]
            lines = [worker.communicate(timeout=LIMIT_S)[0].decode().split() for worker in workers]
            digests |= {line[0] for line in lines}
            assert all((int(line[1]) > 0) == (mode == "on") for line in lines)
            sent[mode] = sum(int(line[2]) - int(line[3]) for line in lines)
    assert len(digests) == 1
    assert sent["on"] == pytest.approx(sent["off"] * (ranks - 1 + 1) / (2 * (ranks - 1)), rel=0.05)
