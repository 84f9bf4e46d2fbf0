"""The testbed in real namespaces: what the switch does to packets, what is left behind (nothing)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tailcut.tools.testbed import HostScenario, character, faults, launch, record
from tailcut.tools.testbed import Testbed as Bed  # by its own name pytest takes it for a test
from tailcut.tools.testbed.scenario import (
    Bursts,
    BurstyLoss,
    HostFreeze,
    HostHang,
    Jobs,
    Kill,
    LinkDown,
    Neighbours,
    Port,
    Switch,
    Tail,
    Wan,
)
from tailcut.tools.testbed.testbed import SwitchKind
from tests.netns import inside

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root for namespaces and BPF")

SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
UDP_SEGMENT = 103
PORT = 9000
FULL_BYTES = 1472
HEADERS_BYTES = 14 + 20 + 8
LIMIT_S = 20
"""Only a hang takes longer."""


@dataclass(frozen=True)
class Arrival:
    payload: bytes
    dscp: int

    @property
    def number(self) -> int:
        return int(struct.unpack_from("!I", self.payload)[0])


def udp(testbed: Bed, host: int) -> socket.socket:
    """A socket on a host, with room for everything that a test sends."""
    with inside(testbed.hosts[host].namespace):
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 64 << 20)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    opened.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
    opened.bind((testbed.hosts[host].address, PORT))
    opened.settimeout(LIMIT_S)
    return opened


def tap(testbed: Bed, host: int) -> socket.socket:
    """Sees the frames that reach a host's interface."""
    with inside(testbed.hosts[host].namespace):
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
        opened.bind(("eth0", 0x0800))
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    opened.settimeout(LIMIT_S)
    return opened


def numbered(number: int, size_bytes: int = FULL_BYTES) -> bytes:
    return (struct.pack("!I", number) * (size_bytes // 4 + 1))[:size_bytes]


def send(testbed: Bed, sender: socket.socket, payloads: list[bytes], to: int = 0, port: int = PORT) -> None:
    for payload in payloads:
        sender.sendto(payload, (testbed.hosts[to].address, port))


def received(receiver: socket.socket, count: int) -> list[Arrival]:
    arrivals = []
    for _ in range(count):
        payload, ancillary, _, _ = receiver.recvmsg(1 << 16, 64)
        ((_, _, tos),) = ancillary
        arrivals.append(Arrival(payload, tos[0] >> 2))
    return arrivals


def send_until_it_comes(testbed: Bed, sender: socket.socket, receiver: socket.socket, payload: bytes) -> None:
    """Send it again and again: a link that was down carries nothing at first."""
    until_s = time.monotonic() + LIMIT_S
    came = b""
    while came != payload:
        assert time.monotonic() < until_s
        send(testbed, sender, [payload])
        if select.select([receiver], [], [], 0.1)[0]:
            came = receiver.recv(1 << 16)


def settled(testbed: Bed, port: int, packets: int) -> None:
    """Wait until so many packets have come to a port, whatever became of them."""
    until_s = time.monotonic() + LIMIT_S
    while (seen := testbed.counters()[port]).packets + seen.dropped < packets:
        assert time.monotonic() < until_s, seen


def scenario(
    rate_mbit_s: float = 200, queue_bytes: int = 8_000_000, seed: int = 0, **switch: object
) -> HostScenario:
    return HostScenario(
        name="test",
        hosts=2,
        seed=seed,
        port=Port(rate_mbit_s=rate_mbit_s, uplink_mbit_s=0, queue_bytes=queue_bytes),
        switch=Switch(**switch),
    )


@contextmanager
def pair(
    description: HostScenario, switch: SwitchKind = "bpf"
) -> Iterator[tuple[Bed, socket.socket, socket.socket]]:
    """A testbed, a socket on host 0 that receives and one on host 1 that sends; their ARP is done."""
    with Bed.up(description, switch) as testbed, udp(testbed, 0) as receiver, udp(testbed, 1) as sender:
        neighbour = f"{testbed.hosts[0].address} lladdr 02:7a:11:00:00:01 dev eth0 nud permanent"
        subprocess.run(
            ["ip", "-n", testbed.hosts[1].namespace, "neigh", "add", *neighbour.split()], check=True
        )
        yield testbed, receiver, sender


def ones_complement(octets: bytes) -> int:
    total = sum(struct.unpack(f"!{len(octets) // 2}H", octets))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def queue_bytes(testbed: Bed, port: str, handle: str) -> int:
    words = ["tc", "-n", testbed.record.switch, "-s", "-j", "qdisc", "show", "dev", port]
    shown = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return next(entry["bytes"] for entry in shown if entry["handle"] == handle)


def test_an_uncongested_port_trims_nothing():
    with pair(scenario(trim_above_bytes=60_000)) as (testbed, receiver, sender):
        send(testbed, sender, [numbered(i) for i in range(30)])
        arrivals = received(receiver, 30)
        assert [len(a.payload) for a in arrivals] == [FULL_BYTES] * 30
        counters = testbed.counters()[0]
        assert (counters.packets, counters.trimmed, counters.dropped, counters.super_packets) == (30, 0, 0, 0)
        assert counters.bytes == 30 * (FULL_BYTES + HEADERS_BYTES)


@pytest.mark.parametrize("looked_at", [False, True])
def test_segments_cross_as_one_packet_only_where_nothing_looks_at_single_ones(looked_at):
    description = scenario(trim_above_bytes=4_000_000) if looked_at else scenario()
    with pair(description) as (testbed, receiver, sender):
        sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, FULL_BYTES)
        send(testbed, sender, [b"".join(numbered(i) for i in range(20))])
        assert sorted(a.number for a in received(receiver, 20)) == list(range(20))
        counters = testbed.counters()[0]
        assert (counters.packets, counters.bytes) == (20, 20 * (FULL_BYTES + HEADERS_BYTES))
        assert counters.super_packets == (0 if looked_at else 1)


@pytest.mark.parametrize("frame_bytes", [256, 128, 333])
def test_a_congested_port_trims_to_the_frame_size_and_what_is_left_is_valid(frame_bytes):
    description = scenario(rate_mbit_s=2, trim_above_bytes=30_000, trim_frame_bytes=frame_bytes)
    with pair(description) as (testbed, receiver, sender), tap(testbed, 0) as capture:
        send(testbed, sender, [numbered(i) for i in range(200)])
        # Sockets on the hosts check sums: their links have no offload. What arrives here is right.
        arrivals = received(receiver, 200)
        full = [a for a in arrivals if a.dscp == 0]
        trimmed = [a for a in arrivals if a.dscp == 48]
        assert len(full) >= 19  # what 30 kB hold
        assert len(full) + len(trimmed) == 200
        assert {len(a.payload) for a in full} == {FULL_BYTES}
        assert {len(a.payload) for a in trimmed} == {frame_bytes - HEADERS_BYTES}
        assert sorted(a.number for a in arrivals) == list(range(200))
        assert all(a.payload == numbered(a.number, len(a.payload)) for a in arrivals)

        counters = testbed.counters()[0]
        assert (counters.trimmed, counters.trimmed_at_random) == (len(trimmed), 0)
        assert (counters.packets, counters.dropped, counters.failed) == (200, 0, 0)

        frames = [capture.recv(1 << 16) for _ in range(200)]
        short = [frame for frame in frames if len(frame) == frame_bytes]
        assert len(short) == len(trimmed)
        for frame in short:
            ip, segment = frame[14:34], frame[34:]
            assert ones_complement(ip) == 0xFFFF
            assert struct.unpack_from("!H", ip, 2) == (frame_bytes - 14,)
            assert struct.unpack_from("!H", segment, 4) == (len(segment),)
            pseudo = ip[12:20] + struct.pack("!HH", 17, len(segment))
            assert ones_complement(pseudo + segment + b"\0" * (len(segment) % 2)) == 0xFFFF


def test_the_shaper_charges_trimmed_lengths_and_lets_trimmed_packets_overtake():
    with pair(scenario(rate_mbit_s=2, trim_above_bytes=30_000)) as (testbed, receiver, sender):
        send(testbed, sender, [numbered(i) for i in range(100)])
        arrivals = received(receiver, 100)
        trimmed = [place for place, a in enumerate(arrivals) if a.dscp == 48]
        full = [place for place, a in enumerate(arrivals) if a.dscp == 0]
        assert queue_bytes(testbed, "p0", "10:") == 256 * len(trimmed)
        control_bytes = queue_bytes(testbed, "p0", "20:") - (FULL_BYTES + HEADERS_BYTES) * len(full)
        assert 0 <= control_bytes < FULL_BYTES  # ARP, and the queries of the bridge
        assert testbed.counters()[0].bytes == 256 * len(trimmed) + (FULL_BYTES + HEADERS_BYTES) * len(full)
        # The first trimmed packet was sent after all the full ones that wait before it.
        assert min(trimmed) < max(full)


def test_lengths_that_are_left_alone_hide_a_packet_from_sockets_but_not_from_the_wire():
    description = scenario(trim_frac=1.0, lengths="leave-lengths")
    with pair(description) as (testbed, receiver, sender), tap(testbed, 0) as capture:
        send(testbed, sender, [numbered(i) for i in range(10)])
        frames = [capture.recv(1 << 16) for _ in range(10)]
        assert {len(frame) for frame in frames} == {256}
        for i, frame in enumerate(frames):
            assert ones_complement(frame[14:34]) == 0xFFFF
            assert frame[15] >> 2 == 48
            assert struct.unpack_from("!H", frame, 16) == (FULL_BYTES + 28,)
            assert struct.unpack_from("!H", frame, 38) == (FULL_BYTES + 8,)
            assert frame[42:] == numbered(i, 256 - HEADERS_BYTES)
        send(testbed, sender, [b"short"])  # not longer than a trimmed frame: passes
        assert received(receiver, 1)[0].payload == b"short"


def test_above_the_hard_limit_everything_is_dropped():
    with pair(scenario(rate_mbit_s=1, queue_bytes=15_140)) as (testbed, receiver, sender):
        send(testbed, sender, [numbered(i) for i in range(50)])
        settled(testbed, 0, 50)
        counters = testbed.counters()[0]
        assert counters.dropped_full == counters.dropped > 0
        assert counters.max_backlog_bytes <= 15_140
        assert [a.number for a in received(receiver, counters.packets)][:10] == list(range(10))


def test_only_the_trimmable_class_is_trimmed():
    description = scenario(trim_frac=1.0, trimmable_dscp=10, trimmable_ports=(PORT, PORT))
    with pair(description) as (testbed, receiver, sender):
        send(testbed, sender, [numbered(0)])
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 10 << 2 | 1)
        send(testbed, sender, [numbered(1)])
        send(testbed, sender, [numbered(2)], port=PORT + 1)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 48 << 2)
        send(testbed, sender, [numbered(3)])
        arrivals = received(receiver, 3)
        assert {a.number: (len(a.payload), a.dscp) for a in arrivals} == {
            0: (FULL_BYTES, 0),
            1: (256 - HEADERS_BYTES, 48),
            3: (FULL_BYTES, 48),
        }


def lost_numbers(description: HostScenario, count: int, switch: SwitchKind = "bpf") -> set[int]:
    with pair(description, switch) as (testbed, receiver, sender):
        send(testbed, sender, [numbered(i, 64) for i in range(count)])
        settled(testbed, 0, count)
        counters = testbed.counters()[0]
        lost = set(range(count)) - {a.number for a in received(receiver, counters.packets)}
        assert len(lost) == counters.dropped == counters.dropped_at_random + counters.dropped_in_bursts
        return lost


def test_random_loss_is_its_fraction_and_a_function_of_the_seed():
    lost = lost_numbers(scenario(loss_frac=0.1), 5000)
    assert 400 < len(lost) < 600  # five standard deviations
    assert lost_numbers(scenario(loss_frac=0.1), 5000) == lost
    assert lost_numbers(scenario(loss_frac=0.1, seed=1), 5000) != lost


def test_bursty_loss_comes_in_bursts_of_the_mean_length():
    bursty = BurstyLoss(enter_frac=0.01, leave_frac=0.1)
    lost = lost_numbers(scenario(bursty_loss=bursty), 10_000)
    starts = [number for number in lost if number - 1 not in lost]
    assert bursty.mean_loss_frac == pytest.approx(0.0909, abs=1e-4)
    assert 0.05 < len(lost) / 10_000 < 0.14
    assert 7 < len(lost) / len(starts) < 13


@pytest.mark.parametrize(
    "rules", [{"loss_frac": 0.1}, {"bursty_loss": BurstyLoss(enter_frac=0.01, leave_frac=0.1)}]
)
def test_the_forwarder_loses_the_same_packets_as_bpf(rules):
    assert lost_numbers(scenario(**rules), 1000, "forwarder") == lost_numbers(scenario(**rules), 1000)


def test_the_forwarder_trims_as_bpf_does():
    description = scenario(rate_mbit_s=2, trim_above_bytes=30_000, trim_frame_bytes=255)
    with pair(description, "forwarder") as (testbed, receiver, sender):
        assert "no BPF" in testbed.switch.description
        send(testbed, sender, [numbered(i) for i in range(100)])
        arrivals = received(receiver, 100)
        trimmed = [place for place, a in enumerate(arrivals) if a.dscp == 48]
        full = [place for place, a in enumerate(arrivals) if a.dscp == 0]
        assert len(full) >= 19
        assert len(full) + len(trimmed) == 100
        assert {len(arrivals[place].payload) for place in trimmed} == {255 - HEADERS_BYTES}
        assert all(a.payload == numbered(a.number, len(a.payload)) for a in arrivals)
        assert min(trimmed) < max(full)
        settled(testbed, 0, 100)
        assert testbed.counters()[0].trimmed == len(trimmed)


@pytest.mark.parametrize("switch", ["bpf", "forwarder"])
def test_packets_between_two_sites_take_the_base_delay(switch):
    description = replace(scenario(), wan=Wan(delay_s=0.03))
    with pair(description, switch) as (testbed, receiver, sender):
        start_s = time.monotonic()
        send(testbed, sender, [b"there"])
        assert received(receiver, 1)[0].payload == b"there"
        assert time.monotonic() - start_s >= 0.03
        assert [c.port for c in testbed.counters()] == ["p0", "p1", "w0", "w1"]


def ip_packets_received(testbed: Bed, host: int) -> int:
    with inside(testbed.hosts[host].namespace):
        names, values = (
            line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()[:2]
        )
    return int(values[names.index("InReceives")])


def test_bursts_load_the_link_and_not_the_host():
    tail = Tail(ratio=2, message_bytes=300_000, gap_min_s=0.001, gap_mean_s=0.001)
    with Bed.up(replace(scenario(), tail=tail)) as testbed:
        testbed.begin_background()
        while not all(c.packets >= 200 for c in testbed.counters()):
            pass
        assert all(ip_packets_received(testbed, host) < 20 for host in (0, 1))  # queries of the bridge


def test_a_burst_comes_six_times_faster_than_it_leaves_and_waits_in_the_port():
    bursts = Bursts(burst_bytes=500_000, gap_min_s=0.3, gap_mean_s=0.01)
    burst_bytes = bursts.frames_bytes(1500)
    with Bed.up(replace(scenario(rate_mbit_s=2), bursts=bursts)) as testbed:
        testbed.begin_background()
        for port in (0, 1):
            settled(testbed, port, burst_bytes // 1514)
        assert all(port.max_backlog_bytes > 0.75 * burst_bytes for port in testbed.counters())
        assert all(port.dropped == 0 for port in testbed.counters())


def test_the_character_is_measured_for_every_port():
    tail = Tail(ratio=3, message_bytes=20_000)
    with Bed.up(replace(scenario(), tail=tail)) as testbed:
        measured = character.measure(testbed, tail_messages=5)
    assert [port.host for port in measured.ports] == [0, 1]
    assert all(0 < port.rtt_s < 1 and port.rate_mbit_s > 0 for port in measured.ports)
    assert all(port.tail_ratio and port.tail_ratio >= 1 for port in measured.ports)
    assert "wanted 3" in measured.lines()[-1]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_faults_that_end_early_are_undone_and_can_begin_anew():
    description = replace(
        scenario(),
        freezes=(HostFreeze(host=0, at_s=0, for_s=3600),),
        link_downs=(LinkDown(host=0, at_s=0, for_s=3600),),
    )
    told: queue.SimpleQueue[faults.Event] = queue.SimpleQueue()
    with pair(description) as (testbed, receiver, sender):
        frozen = testbed.spawn(0, ["sleep", "3600"])
        for number in (b"1", b"2"):
            testbed.begin_faults(told.put)
            assert {told.get(timeout=LIMIT_S).action for _ in range(2)} == {"freeze", "link down"}
            testbed.end_faults()
            while state(frozen.pid) == "T":
                pass
            send_until_it_comes(testbed, sender, receiver, number)


def test_faults_stop_and_kill_processes_and_darken_links():
    description = replace(
        scenario(),
        freezes=(HostFreeze(host=0, at_s=0, for_s=3600),),
        kills=(Kill(host=1, at_s=0),),
        link_downs=(LinkDown(host=0, at_s=0, for_s=0.05),),
    )
    told: queue.SimpleQueue[faults.Event] = queue.SimpleQueue()
    with pair(description) as (testbed, receiver, sender):
        frozen, killed = (testbed.spawn(host, ["sleep", "3600"]) for host in (0, 1))
        testbed.begin_faults(told.put)
        assert killed.wait(LIMIT_S) == -signal.SIGKILL
        while state(frozen.pid) != "T":
            pass
        assert testbed.killed == {1}
        heard = {told.get(timeout=LIMIT_S).action for _ in range(4)}
        assert heard == {"freeze", "kill", "link down", "link up"}
        assert carrier_changes(testbed, 0) >= 3  # up, down, up
        send(testbed, sender, [b"back"])
        assert received(receiver, 1)[0].payload == b"back"
    assert frozen.wait(LIMIT_S) == -signal.SIGKILL


TWO_THREADS = """
import json, sys, threading, time
beats, told = [0], []
def beat():
    while True:
        beats[0] += 1
        time.sleep(0.005)
threading.Thread(target=beat, daemon=True).start()
print("on", flush=True)
for line in sys.stdin:  # the main thread answers with what the other has done since
    print(beats[0], flush=True)
"""


def beats(process: subprocess.Popen[bytes]) -> int:
    process.stdin.write(b"\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_a_program_that_hangs_has_its_other_threads_going():
    description = replace(scenario(), hangs=(HostHang(host=1, at_s=0, for_s=0.5),))
    told: queue.SimpleQueue[faults.Event] = queue.SimpleQueue()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Bed.up(description) as testbed:
        programs = [testbed.spawn(host, [sys.executable, "-c", TWO_THREADS], **pipes) for host in (0, 1)]
        for program in programs:
            assert program.stdout.readline() == b"on\n"
        before = [beats(program) for program in programs]
        testbed.begin_faults(told.put)
        assert told.get(timeout=LIMIT_S).action == "hang"
        assert traced(programs[1].pid) == [programs[1].pid]
        assert traced(programs[0].pid) == []
        after = [beats(program) for program in programs]  # that of host 1 answers when it has resumed
        assert told.get(timeout=LIMIT_S).action == "resume"
        assert traced(programs[1].pid) == []
        assert after[1] - before[1] > 20  # of 100 beats in half a second, on a busy machine
        assert after[1] - before[1] > after[0] - before[0]
        for program in programs:
            program.communicate(timeout=LIMIT_S)
            assert program.returncode == 0


def traced(pid: int) -> list[int]:
    """Threads of a process that are traced."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(path.name) for path in threads if "TracerPid:\t0\n" not in (path / "status").read_text()]


def test_a_program_that_hangs_can_be_killed_and_goes_on_when_the_faults_end():
    description = replace(scenario(), hangs=tuple(HostHang(host=host, at_s=0, for_s=3600) for host in (0, 1)))
    told: queue.SimpleQueue[faults.Event] = queue.SimpleQueue()
    with Bed.up(description) as testbed:
        killed, released = (testbed.spawn(host, ["sh", "-c", "sleep 3600; true"]) for host in (0, 1))
        testbed.begin_faults(told.put)
        assert {told.get(timeout=LIMIT_S).host for _ in range(2)} == {0, 1}
        assert traced(killed.pid) == [killed.pid]
        os.killpg(killed.pid, signal.SIGKILL)
        assert killed.wait(LIMIT_S) == -signal.SIGKILL
        testbed.end_faults()
        assert traced(released.pid) == []
        os.killpg(released.pid, signal.SIGTERM)
        assert released.wait(LIMIT_S) == -signal.SIGTERM


def test_neighbours_send_over_every_port_and_stop():
    neighbours = Neighbours(flow_bytes=200_000, gap_mean_s=0.02)
    with Bed.up(replace(scenario(), neighbours=neighbours)) as testbed:
        assert all(c.bytes < 10_000 for c in testbed.counters())
        testbed.begin_background()
        while not all(c.bytes > 5 * neighbours.flow_bytes for c in testbed.counters()):
            pass
        assert all(ip_packets_received(testbed, host) < 50 for host in (0, 1))  # not the host's
        testbed.end_background()
        for host in (0, 1):
            words = ["ip", "netns", "pids", testbed.record.neighbour(host)]
            assert subprocess.run(words, check=True, capture_output=True).stdout == b""


def test_jobs_average_again_and_again_and_stop():
    jobs = Jobs(count=2, op_bytes=200_000, gap_mean_s=0.02)
    with Bed.up(replace(scenario(), jobs=jobs)) as testbed:
        testbed.begin_background()
        while not all(c.bytes > 5 * jobs.count * jobs.op_bytes for c in testbed.counters()):
            pass
        assert all(ip_packets_received(testbed, host) < 50 for host in (0, 1))  # not the host's
        testbed.end_background()
        for host in (0, 1):
            words = ["ip", "netns", "pids", testbed.record.neighbour(host)]
            assert subprocess.run(words, check=True, capture_output=True).stdout == b""


def carrier_changes(testbed: Bed, host: int) -> int:
    words = [
        "ip",
        "netns",
        "exec",
        testbed.hosts[host].namespace,
        "cat",
        "/sys/class/net/eth0/carrier_changes",
    ]
    return int(subprocess.run(words, check=True, capture_output=True).stdout)


def left_behind() -> list[str]:
    """Everything on this machine that bears the name of a testbed."""
    programs = json.loads(subprocess.run(["bpftool", "-j", "prog"], check=True, capture_output=True).stdout)
    return [
        *(path.name for path in Path("/run/netns").glob("tailcut-*-*-*-*")),
        *(path.name for path in Path("/run/tailcut").glob("*")),
        *(line for line in Path("/proc/mounts").read_text().splitlines() if "/run/tailcut" in line),
        *(str(entry["id"]) for entry in programs if entry.get("name") == "trim"),
        *(pid.parent.name for pid in Path("/proc").glob("[0-9]*/environ") if marked(pid)),
    ]


def marked(environment: Path) -> bool:
    with contextlib.suppress(OSError):
        return f"{record.MARK}=".encode() in environment.read_bytes()
    return False


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    record.remove_leftovers()
    before = set(left_behind())  # somebody else's
    yield
    record.remove_leftovers()
    until_s = time.monotonic() + LIMIT_S  # the kernel takes programs apart after the fact
    while (left := set(left_behind()) - before) and time.monotonic() < until_s:
        pass
    assert left == set()


TAILCUT = [sys.executable, "-m", "tailcut.tools.cli", "testbed"]


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TAILCUT, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.long
@pytest.mark.usefixtures("nothing_is_left")
def test_nothing_is_left_after_fifty_testbeds_of_which_some_were_killed():
    chance = random.Random(0)
    for cycle in range(50):
        if cycle % 5:
            with Bed.up(scenario()) as testbed:
                testbed.spawn(0, ["sleep", "3600"])
            continue
        with started("run", "clean", "--no-measure", "--", "sh", "-c", "echo on; sleep 3600") as process:
            if cycle % 2:
                for line in process.stdout:
                    if line.startswith("[h3] on"):
                        break
            else:  # wherever it is just then
                select.select([], [], [], chance.uniform(0.1, 0.6))
            process.kill()


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing(number, code):
    command = [*TAILCUT, "run", "clean", "--no-measure", "--", "sh", "-c", "echo on; sleep 3600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline().endswith(b"on\n")
        process.send_signal(number)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == code


def test_two_testbeds_do_not_meet():
    with pair(scenario(trim_frac=1.0)) as (one, one_in, one_out), pair(scenario()) as (two, two_in, two_out):
        assert one.record.id != two.record.id
        send(one, one_out, [numbered(1)])
        send(two, two_out, [numbered(2)])
        assert [(a.number, a.dscp) for a in received(one_in, 1)] == [(1, 48)]
        assert [(a.number, a.dscp) for a in received(two_in, 1)] == [(2, 0)]
        assert (one.counters()[0].packets, two.counters()[0].packets) == (1, 1)


def test_a_record_of_a_process_that_is_no_more_is_a_leftover(tmp_path):
    assert not record.Record(f"{os.getpid()}-1-0", tmp_path).owner_lives  # its pid was used again
    own = record.Record.create()
    try:
        assert own.owner_lives
        assert own.id not in record.remove_leftovers()
    finally:
        own.remove()


class Heard:
    """An audience that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, bool]] = []

    def line(self, host: int, text: str, to_stderr: bool) -> None:
        self.lines.append((host, text, to_stderr))

    def fault(self, event: faults.Event) -> None:
        pass

    def glance(self, testbed: Bed, now_s: float) -> None:
        testbed.publish_status()


def test_every_host_runs_the_command_as_a_rank():
    heard = Heard()
    script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT; printf end >&2"
    with Bed.up(scenario()) as testbed:
        endings = launch.run_on_all(testbed, ["sh", "-c", script], heard)
        assert testbed.record.read_status()["scenario"] == "test"
    assert sorted(heard.lines) == [
        (0, "0 2 0 10.77.0.1 29500", False),
        (0, "end", True),
        (1, "1 2 0 10.77.0.1 29500", False),
        (1, "end", True),
    ]
    assert sorted(endings, key=lambda ending: ending.host) == [
        launch.Ending(0, 0, False),
        launch.Ending(1, 0, False),
    ]


def test_a_command_that_fails_ends_the_others_and_gives_its_status():
    script = 'if [ "$RANK" = 1 ]; then exit 7; fi; sleep 3600'
    with Bed.up(scenario()) as testbed:
        endings = launch.run_on_all(testbed, ["sh", "-c", script], Heard())
    assert endings == [launch.Ending(1, 7, False), launch.Ending(0, 128 + signal.SIGTERM, True)]
    assert launch.exit_status(endings) == 7


def test_a_rank_that_the_scenario_kills_is_no_failure():
    description = replace(scenario(), kills=(Kill(host=0, at_s=0),))
    script = 'if [ "$RANK" = 0 ]; then sleep 3600; fi'
    with Bed.up(description) as testbed:
        endings = launch.run_on_all(testbed, ["sh", "-c", script], Heard())
    assert launch.Ending(0, 128 + signal.SIGKILL, True) in endings
    assert launch.exit_status(endings) == 0


def tailcut_json(*words: str) -> Any:
    return json.loads(subprocess.run([*TAILCUT, *words], check=True, capture_output=True, text=True).stdout)


def test_run_prints_one_json_document_and_measures_first():
    document = tailcut_json("run", "clean", "--hosts", "2", "--json", "--", "true")
    assert (document["scenario"], document["switch"]) == ("clean", "BPF in the kernel")
    assert [port["port"] for port in document["ports"]] == ["p0", "p1"]
    assert all(port["rate_mbit_s"] > 0 for port in document["character"]["ports"])
    assert [ending["code"] for ending in document["endings"]] == [0, 0]


def test_up_stays_until_down():
    status = tailcut_json("up", "clean", "--hosts", "2", "--json")
    try:
        enter = status["hosts"][1]["enter"].split()
        shown = subprocess.run(
            [*enter, "ip", "-br", "addr"], check=True, capture_output=True, text=True
        ).stdout
        assert "10.77.0.2/24" in shown
        (seen,) = tailcut_json("status", status["id"], "--json")
        assert seen["alive"]
    finally:
        subprocess.run([*TAILCUT, "down", status["id"]], check=True)
    assert status["id"] not in [found.id for found in record.records()]
    assert not list(Path("/run/netns").glob(f"tailcut-{status['id']}-*"))


def test_down_removes_what_a_killed_keeper_left():
    status = tailcut_json("up", "clean", "--hosts", "2", "--json")
    os.kill(status["owner_pid"], signal.SIGKILL)
    while record._started_ticks(status["owner_pid"]) is not None:
        pass
    done = subprocess.run([*TAILCUT, "down", status["id"]], check=True, capture_output=True, text=True)
    assert done.stdout == f"removed {status['id']}, whose owner was killed\n"
    assert not list(Path("/run/netns").glob(f"tailcut-{status['id']}-*"))


# Everybody may enter what nobody runs: an interpreter under /root is moved out of its way.
AS_NOBODY = """
set -e
if ! setpriv --reuid=65534 --regid=65534 --clear-groups test -x "$0"; then
    mount --bind "$1" /mnt
    mount -t tmpfs -o mode=755 tmpfs /root
    mkdir -p "$1"
    mount --move /mnt "$1"
fi
shift
cd /
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
"""


def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
    interpreter = [os.path.realpath(sys.executable), sys.base_prefix]
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", AS_NOBODY, *interpreter, *TAILCUT, *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_root_the_same_command_works_and_says_what_forwards():
    if as_nobody("scenarios").returncode:
        pytest.skip("NOT RUN: user 'nobody' cannot run this interpreter")
    done = as_nobody("run", "trim-50", "--hosts", "2", "--json", "--", "sh", "-c", "ip -br addr show eth0")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["switch"] == "user-space forwarders, no BPF"
    assert "[h1] eth0" in done.stderr
    assert [ending["code"] for ending in document["endings"]] == [0, 0]
    assert "[testbed] TCP rate" in done.stderr
    assert as_nobody("status").stdout == "no testbed is up\n"
