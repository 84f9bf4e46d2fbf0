"""Scenarios as files and values, and what follows from them without a network: no root, no time."""

from __future__ import annotations

import io
import math
import random
import struct
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from tailcut import ConfigError
from tailcut.tools.testbed import (
    HostScenario,
    bpf,
    bursts,
    character,
    faults,
    load_scenario,
    parse_scenario,
    shipped_names,
    system,
)
from tailcut.tools.testbed.counters import PortCounters
from tailcut.tools.testbed.display import Screen
from tailcut.tools.testbed.scenario import Bursts, BurstyLoss, HostFreeze, HostHang, Kill, LinkDown, Switch
from tailcut.tools.testbed.topology import SwitchPort, site, switch_ports
from tailcut.tools.testbed.virtual_queue import VirtualQueue, cut, is_traffic, is_trimmable

SOME_BURSTS = "[bursts]\ngap_min_s = 1\ngap_mean_s = 1\n"


def test_the_scenarios_of_the_design_are_shipped_and_valid():
    names = [
        "bursts",
        "clean",
        "cross-dc",
        "dead-rank",
        "incast",
        "jobs-16",
        "jobs-4",
        "link-down",
        "lossy-1",
        "neighbours",
        "straggler",
        "stuck-rank",
        "tail-1.5",
        "tail-3",
    ]
    assert shipped_names() == [*names, "trim-50"]
    for name in shipped_names():
        shipped = load_scenario(name)
        assert shipped.name == name
        assert shipped.description


def test_a_tail_and_a_table_of_bursts_are_the_same_kind_of_traffic():
    assert load_scenario("tail-3").background == Bursts(burst_bytes=2_000_000, gap_min_s=0.4, gap_mean_s=0.6)
    assert load_scenario("tail-1.5").background.burst_bytes == 500_000
    assert load_scenario("clean").background is None
    shipped = load_scenario("bursts")
    assert shipped.background == shipped.bursts
    assert shipped.bursts.gap_min_s + shipped.bursts.gap_mean_s == 14
    frames_bytes = shipped.bursts.frames_bytes(shipped.port.mtu_bytes)
    assert frames_bytes == math.ceil(20_000_000 / 1472) * 1514
    assert 8e-6 * frames_bytes / shipped.port.rate_mbit_s == pytest.approx(0.8, rel=0.05)


def test_a_file_and_overrides(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "hosts = 3\n[port]\nrate_mbit_s = 100\n[switch.bursty_loss]\nenter_frac=0.1\nleave_frac=0.5\n"
    )
    mine = load_scenario(str(path), seed=5)
    assert (mine.name, mine.hosts, mine.seed, mine.port.uplink) == ("mine", 3, 5, 100)
    assert mine.switch.bursty_loss == BurstyLoss(enter_frac=0.1, leave_frac=0.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hosts = ", "not valid TOML"),
        ("hosts = 1", "hosts = 1 must be between 2 and 64"),
        ("hosts = '4'", "hosts = '4' is not of type int"),
        ("hots = 4", "unknown hots; known are name, description, hosts"),
        ("port = 4", r"\[port\]: must be a table"),
        ("[port]\nmtu_bytes = 100", r"\[port\]: mtu_bytes = 100 must be between 576 and 9000"),
        ("[port]\nqueue_bytes = 1000", "must hold two packets"),
        ("[port]\nburst_bytes = 1500", "burst_bytes = 1500 must hold two packets"),
        ("[port]\nrate_mbit_s = 0", "rate_mbit_s = 0 must be above 0"),
        ("[switch]\nloss_frac = 2", "loss_frac = 2 must be between 0 and 1"),
        ("[switch]\nlengths = 'fix'", "lengths = 'fix' is not of type"),
        ("[switch]\ntrim_frame_bytes = 42", "above the headers' 42"),
        ("[switch]\ntrimmable_dscp = 48", "nothing would ever be trimmed"),
        ("[switch]\ntrimmable_ports = [5, 4]", "not a first and a last UDP port"),
        ("[switch]\nbursty_loss = {enter_frac = 0.1}", "'leave_frac' missing"),
        ("[tail]\nratio = 0.5", "ratio = 0.5 must be above 1"),
        ("[tail]\nratio = 2\n[wan]", "tail and wan exclude each other"),
        ("[bursts]\nburst_bytes = 1000\ngap_min_s = 1", "'gap_mean_s' missing"),
        (f"{SOME_BURSTS}burst_bytes = 0", "burst_bytes = 0 must be above 0"),
        (f"{SOME_BURSTS}burst_bytes = 8_000_000", "a burst is 8228590 bytes .* raise that"),
        (f"{SOME_BURSTS}burst_bytes = 1000\n[wan]", "bursts and wan exclude each other"),
        (f"{SOME_BURSTS}burst_bytes = 1000\n[tail]\nratio = 2", "bursts and tail exclude each other"),
        ("[tail]\nratio = 12", "a burst is [0-9]+ bytes .* raise that"),
        ("[neighbours]\nflow_bytes = 0\ngap_mean_s = 1", "flow_bytes = 0 must be above 0"),
        ("[jobs]\ncount = 0\nop_bytes = 1\ngap_mean_s = 1", "count = 0 must be above 0"),
        (
            "[jobs]\ncount = 1\nop_bytes = 1\ngap_mean_s = 1\n[neighbours]\nflow_bytes = 1\ngap_mean_s = 1",
            "neighbours and jobs exclude each other",
        ),
        ("[[hangs]]\nhost = 0\nat_s = 1\nfor_s = 0", "for_s = 0 must be above 0"),
        ("[[kills]]\nhost = 4\nat_s = 1", "names host 4; the hosts are 0 to 3"),
        ("[[freezes]]\nhost = 0\nat_s = -1\nfor_s = 1", "must not be negative"),
    ],
)
def test_what_is_wrong_with_a_scenario_is_named(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_scenario(text, "test")


def test_the_second_half_of_the_hosts_is_the_other_site():
    apart = load_scenario("cross-dc", hosts=5)
    assert [site(apart, host) for host in range(5)] == [0, 0, 0, 1, 1]
    assert [port.name for port in switch_ports(apart)] == ["p0", "p1", "p2", "p3", "p4", "w0", "w1"]
    assert [port.delay_s for port in switch_ports(apart)][-2:] == [0.01, 0.01]


def test_bursts_keep_their_gap_and_their_seed():
    times = list(islice(bursts.burst_times(7, 3, 0.3, 0.5), 300))
    assert times == sorted(times) == list(islice(bursts.burst_times(7, 3, 0.3, 0.5), 300))
    assert times != list(islice(bursts.burst_times(8, 3, 0.3, 0.5), 300))
    for port in range(3):
        own = [at_s for at_s, to in times if to == port]
        assert min(after - before for before, after in pairwise(own)) >= 0.3
        assert own[-1] / len(own) == pytest.approx(0.8, rel=0.3)


def test_bursts_to_several_ports_take_turns_and_each_keeps_its_rate():
    coming = iter([(1.0, 0), (1.5, 1), (9.0, 2)])
    slices = list(bursts.slices(coming, packets=80, packets_per_s=32.0))
    assert slices == [(1.0, 0, 32), (1.5, 1, 32), (2.0, 0, 32), (2.5, 1, 32), (3.0, 0, 16), (3.5, 1, 16)]


def test_a_tail_is_the_ratio_of_nearest_ranks():
    assert character.tail_ratio([2.0] * 296 + [6.0, 8.0, 9.0, 9.0]) == 3.0
    port = character.PortCharacter(0, 1e-5, 190.0, 1.62)
    assert character.Character(10**6, (port,), 1.5).within_tolerance
    assert not character.Character(10**6, (replace(port, tail_ratio=1.66),), 1.5).within_tolerance


def test_events_come_in_order_and_follow_the_seed():
    description = replace(
        HostScenario(name="test"),
        freezes=(HostFreeze(host=0, at_s=1, for_s=0.1, every_s=0.5),),
        kills=(Kill(host=1, at_s=2),),
        link_downs=(LinkDown(host=0, at_s=0.5, for_s=1),),
        hangs=(HostHang(host=1, at_s=0.75, for_s=2),),
    )
    events = list(islice(faults.schedule(description), 50))
    assert events == sorted(events) == list(islice(faults.schedule(description), 50))
    assert events != list(islice(faults.schedule(replace(description, seed=1)), 50))
    assert events[0] == faults.Event(0.5, 0, "link down")
    assert faults.Event(1.5, 0, "link up") in events
    assert faults.Event(2, 1, "kill") in events
    assert {faults.Event(0.75, 1, "hang"), faults.Event(2.75, 1, "resume")} <= set(events)
    freezes = [event for event in events if event.action == "freeze"]
    releases = [event for event in events if event.action == "release"]
    assert all(
        end.at_s - start.at_s == pytest.approx(0.1) for start, end in zip(freezes, releases, strict=False)
    )


def test_what_is_not_installed_is_named_with_its_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    system.program.cache_clear()
    try:
        with pytest.raises(ConfigError, match="the testbed needs clang: apt-get install clang"):
            bpf.compiled("trim.bpf.c")
        assert list((tmp_path / "tailcut").iterdir()) == []
    finally:
        system.program.cache_clear()


def port(**rules: object) -> SwitchPort:
    """8 Mbit/s: a byte takes a microsecond."""
    return SwitchPort(0, "p0", 8.0, 10_000, 1500, 3028, Switch(**rules))


def test_a_virtual_queue_drains_at_its_rate_and_drops_above_its_limit():
    queue = VirtualQueue(port(), seed=0)
    assert [queue.admit(1000, True, 0) for _ in range(11)] == ["pass"] * 10 + ["drop"]
    assert queue.counters(1_000_000).backlog_bytes == 9000
    assert queue.admit(1000, True, 1_000_000) == "pass"
    assert queue.admit(1, True, 1_000_000) == "drop"
    counters = queue.counters(11_000_000)
    assert (counters.backlog_bytes, counters.max_backlog_bytes, counters.dropped_full) == (0, 10_000, 2)
    assert (counters.packets, counters.bytes) == (11, 11_000)


def test_a_virtual_queue_trims_from_its_threshold_on_and_charges_what_is_left():
    queue = VirtualQueue(port(trim_above_bytes=2000), seed=0)
    assert [queue.admit(1000, True, 0) for _ in range(3)] == ["pass", "pass", "trim"]
    assert queue.counters(0).bytes == 2256
    assert queue.admit(1000, False, 0) == "pass"  # of another class


def test_counters_are_differences_but_for_the_backlog():
    queue = VirtualQueue(port(), seed=0)
    queue.admit(1000, True, 0)
    before = queue.counters(0)
    queue.admit(500, True, 0)
    since = queue.counters(0).since(before)
    assert (since.packets, since.bytes, since.backlog_bytes, since.max_backlog_bytes) == (1, 500, 1500, 1500)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Counted:
    """As much of a testbed as a screen looks at."""

    def __init__(self) -> None:
        self.queues = [VirtualQueue(port(), seed) for seed in (0, 1)]

    def publish_status(self) -> None:
        pass

    def counters(self) -> list[PortCounters]:
        return [queue.counters(0) for queue in self.queues]


def test_lines_have_their_host_in_front_and_the_status_stays_below(monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    out, err, counted = io.StringIO(), Terminal(), Counted()
    screen = Screen(out, err)
    screen.line(1, "hello", to_stderr=False)
    screen.glance(counted, 0.0)
    counted.queues[0].admit(1000, True, 0)
    screen.glance(counted, 1e-3)
    assert out.getvalue() == "[h1] hello\n"
    assert err.getvalue() == "p0 8M q1k t0 d0\np0 0M q0k t0 d0"
    screen.line(0, "oh", to_stderr=True)
    assert err.getvalue().endswith("\r\x1b[K\x1b[1A\x1b[K[h0] oh\np0 8M q1k t0 d0\np0 0M q0k t0 d0")
    screen.close()
    assert err.getvalue().endswith("\r\x1b[K\x1b[1A\x1b[K")


def frame(payload: bytes, dscp: int = 0, to: int = 9000, check: int = 1) -> bytes:
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, dscp << 2 | 2, 28 + len(payload), 7, 0, 64, 17, 0, b"\x0a\0\0\1", b"\x0a\0\0\2"
    )
    return b"\2" * 12 + b"\x08\0" + ip + struct.pack("!HHHH", 9000, to, 8 + len(payload), check) + payload


def ones_complement(octets: bytes) -> int:
    octets += b"\0" * (len(octets) % 2)
    total = sum(struct.unpack(f"!{len(octets) // 2}H", octets))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@pytest.mark.parametrize("frame_bytes", [256, 255])
def test_a_cut_frame_is_valid(frame_bytes):
    whole = frame(random.Random(1).randbytes(1000))
    left = cut(whole, Switch(trim_frame_bytes=frame_bytes))
    assert len(left) == frame_bytes
    assert left[42:] == whole[42:frame_bytes]
    assert left[15] == 48 << 2 | 2  # ECN stays
    assert ones_complement(left[14:34]) == 0xFFFF
    assert ones_complement(left[26:34] + struct.pack("!HH", 17, frame_bytes - 34) + left[34:]) == 0xFFFF
    assert cut(frame(bytes(1000), check=0), Switch())[40:42] == b"\0\0"
    untouched = cut(whole, Switch(lengths="leave-lengths"))
    assert (untouched[16:18], untouched[34:]) == (whole[16:18], whole[34:256])
    assert ones_complement(untouched[14:34]) == 0xFFFF


def test_the_trimmable_class_is_by_port_dscp_and_size():
    rules = Switch(trimmable_ports=(9000, 9001), trimmable_dscp=10)
    long = bytes(1000)
    assert is_trimmable(frame(long, dscp=10), rules)
    assert not is_trimmable(frame(long), rules)
    assert not is_trimmable(frame(long, dscp=10, to=9002), rules)
    assert not is_trimmable(frame(bytes(214), dscp=10), rules)
    assert is_trimmable(frame(long), Switch())
    assert not is_trimmable(frame(long, dscp=48), Switch())
    assert not is_trimmable(frame(long, to=9), Switch())
    assert is_traffic(frame(long))
    assert not is_traffic(b"\2" * 12 + b"\x08\x06" + bytes(28))
