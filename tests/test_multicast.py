"""Multicast over real sockets: who is a member, who is found to hear whom, and what stays where it should."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailcut import Group, _native
from tailcut.meeting import multicast_probe
from tailcut.meeting.addresses import LOOPBACK, multicast_mtu_bytes
from tailcut.meeting.multicast import Medium, choose_interface, group_address, refusal
from tailcut.meeting.multicast_probe import (
    _HELLO,
    _MESSAGE,
    _PATIENCE_S,
    _SILENCE_S,
    _STATE,
    Peer,
    Probe,
    _everybody,
)
from tailcut.policy.deadline import fixed_bounds
from tailcut.tools.testbed import HostScenario
from tailcut.tools.testbed import Testbed as Bed  # by its own name pytest takes it for a test
from tests.groups import allreduce, open_groups, vectors
from tests.netns import drop_leaving, inside, needs_root

SO_RCVBUFFORCE = 33  # asm-generic/socket.h; not in the socket module
LIMIT_S = 20
"""Only a hang takes longer."""
TAG = 0x0123_4567_89AB
ADDRESS, PORT = group_address(TAG)


@pytest.fixture(autouse=True)
def multicast_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILCUT_MULTICAST", "auto")


def number(address: str) -> int:
    return int(ipaddress.IPv4Address(address))


def lane_of(interface: str = LOOPBACK) -> _native.UdpLane:
    return _native.UdpLane(number(interface), 0, True)


def joined(loop: bool = True) -> _native.UdpLane:
    lane = lane_of()
    lane.join_multicast(number(ADDRESS), PORT, number(LOOPBACK), 1, loop)
    return lane


def send_from(lane: _native.UdpLane, datagram: bytes) -> None:
    with socket.fromfd(lane.descriptor, socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(datagram, (ADDRESS, PORT))


def come_to(lane: _native.UdpLane) -> list[bytes]:
    """What waits on its multicast socket; over loopback it is there when it is sent."""
    found = []
    with (
        socket.fromfd(lane.group_descriptor, socket.AF_INET, socket.SOCK_DGRAM) as member,
        contextlib.suppress(BlockingIOError),
    ):
        while True:
            found.append(member.recv(65_535, socket.MSG_DONTWAIT))
    return found


# ---- membership --------------------------------------------------------------------------------------------


def test_every_member_of_one_host_gets_a_copy_and_none_of_its_own() -> None:
    lanes = [joined() for _ in range(3)]
    for index, lane in enumerate(lanes):
        send_from(lane, bytes([index]) * 1000)
    for index, lane in enumerate(lanes):
        assert come_to(lane) == [bytes([other]) * 1000 for other in range(3) if other != index]


def test_one_that_has_left_gets_nothing_and_may_join_again() -> None:
    sender, member = joined(), joined()
    member.leave_multicast()
    assert member.group_descriptor == -1
    send_from(sender, b"unheard")
    member.join_multicast(number(ADDRESS), PORT, number(LOOPBACK), 1, True)
    member.join_multicast(number(ADDRESS), PORT, number(LOOPBACK), 1, True)  # instead of the first
    send_from(sender, b"heard")
    assert come_to(member) == [b"heard"]


def test_a_port_that_somebody_has_cannot_be_joined() -> None:
    lane = lane_of()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", PORT))
        with pytest.raises(RuntimeError, match="bind: Address already in use"):
            lane.join_multicast(number(ADDRESS), PORT, number(LOOPBACK), 1, True)
    assert lane.group_descriptor == -1


def test_an_interface_that_this_host_does_not_have_cannot_be_joined() -> None:
    with pytest.raises(RuntimeError, match="IP_MULTICAST_IF"):
        lane_of().join_multicast(number(ADDRESS), PORT, number("203.0.113.1"), 1, True)


def test_the_engine_receives_what_comes_to_the_group() -> None:
    lane, sender = joined(), joined()
    lane.start(
        rank=0, ranks=2, rows=1, seed=0, group_tag=7, window_ops=4, codec=_native.CODEC_RAW, resend=True,
        carry=True, pool_bytes=1 << 20, window_bytes=1 << 20, terms=_native.Terms(fixed_bounds(10.0), 16),
        peers=[_native.PeerSettings(1 << 20, 1 << 20, 1424, 0, True)] * 2,
        addresses=[(number(LOOPBACK), 9)] * 2, sources=[[]] * 2,
    )  # fmt: skip
    send_from(sender, b"\x7c\x09" + bytes(300))  # of another version
    send_from(lane, b"\x7c\x09" + bytes(300))  # its own
    send_from(sender, b"\x7c\x02\x01" + bytes(300))  # of another group
    give_up = time.monotonic() + LIMIT_S
    while lane.stats().protocol.rejected["group"] < 1 and time.monotonic() < give_up:
        select.select([], [], [], 0.001)
    rejected = lane.stats().protocol.rejected
    assert (rejected["group"], rejected["version"], rejected["source"]) == (1, 1, 0)
    assert len(lane.stats().rtt_ns) == 2
    lane.close(0)
    assert lane.join(10**9 * LIMIT_S)


# ---- where ------------------------------------------------------------------------------------------------


def test_addresses_stay_within_the_organization_and_differ() -> None:
    addresses = [group_address(tag) for tag in range(1000)]
    network = ipaddress.ip_network("239.192.0.0/14")
    assert all(ipaddress.ip_address(address) in network for address, _ in addresses)
    assert all(61_000 <= port < 65_536 for _, port in addresses)
    assert len(set(addresses)) == 1000


@pytest.mark.parametrize(
    ("local", "bound", "chosen"),
    [
        ({1: "127.0.0.1", 2: "127.0.0.1"}, "", ("127.0.0.1", (1, 2))),
        ({1: "127.0.0.1", 2: "127.0.0.1", 3: "10.0.0.1"}, "", ("10.0.0.1", (3,))),
        ({1: "10.0.0.1", 2: "10.1.0.1", 3: "10.1.0.1"}, "", ("10.1.0.1", (2, 3))),
        ({1: "10.0.0.1", 2: "10.1.0.1", 3: "10.1.0.1"}, "10.0.0.1", ("10.0.0.1", (1, 2, 3))),
        ({}, "", ("", ())),
    ],
)
def test_the_interface_is_the_configured_one_or_that_of_most_peers(local, bound, chosen) -> None:
    assert choose_interface(local, bound) == chosen


def test_nothing_is_tried_where_nothing_is_gained() -> None:
    assert refusal("off", 8) == "it is off"
    assert refusal("auto", 2) == "too few ranks to gain"
    assert refusal("auto", 3) == refusal("on", 2) == ""


def test_the_packet_size_is_that_of_the_interface() -> None:
    assert multicast_mtu_bytes(ADDRESS, LOOPBACK) in (65_535, 65_536)  # IP ends there
    assert multicast_mtu_bytes(ADDRESS, "203.0.113.1") is None


# ---- who hears whom ----------------------------------------------------------------------------------------


class Rank:
    """One rank of three; the probe is told the time."""

    def __init__(self, rank: int, lanes: int = 1) -> None:
        self.rank = rank
        self.instance = bytes([rank]) * 16
        self.lanes = [lane_of() for _ in range(lanes)]
        self.senders = [
            socket.fromfd(lane.descriptor, socket.AF_INET, socket.SOCK_DGRAM) for lane in self.lanes
        ]
        self.post = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.post.bind((LOOPBACK, 0))

    def begin(self, ranks: list[Rank], medium: Medium | str | None = None) -> None:
        others = [other for other in ranks if other is not self]
        peers = {other.instance: Peer(other.rank, other.post.getsockname()) for other in others}
        everywhere = Medium(LOOPBACK, 1, 9000, tuple(other.rank for other in others), True, 2)
        self.probe = Probe(
            self.lanes, self.senders, self.post, self.instance, TAG, peers, medium or everywhere
        )

    def close(self) -> None:
        self.probe.close()
        for opened in (self.post, *self.senders):
            opened.close()


@contextlib.contextmanager
def three_ranks(lanes: int = 1) -> Iterator[list[Rank]]:
    ranks = [Rank(rank, lanes) for rank in range(3)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def talk(ranks: list[Rank], now: float = 0.0) -> None:
    """Everything that is to be sent now, and every answer."""
    for rank in ranks:
        rank.probe.send(now)
    for _ in range(3):
        for rank in ranks:
            rank.probe.receive(now)


def test_all_find_that_all_hear_them_on_every_lane() -> None:
    with three_ranks(lanes=2) as ranks:
        for rank in ranks:
            rank.begin(ranks)
        talk(ranks)
        assert [rank.probe.pending(0.0) for rank in ranks] == [[], [], []]
        outcomes = [rank.probe.conclude() for rank in ranks]
        assert [outcome.members for outcome in outcomes] == [(1, 2), (0, 2), (0, 1)]
        assert all(outcome.payload_bytes == 9000 - _native.HEADER_BYTES for outcome in outcomes)
        assert outcomes[0].description == "multicast to 2 of 2 peers on lo, ttl 1"


def test_one_that_cannot_join_is_left_to_unicast_at_once() -> None:
    with three_ranks() as ranks:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("", PORT))
            ranks[2].begin(ranks)
        for rank in ranks[:2]:
            rank.begin(ranks, Medium(LOOPBACK, 1, 9000, (0, 1, 2), True, 1))
        talk(ranks)
        assert [rank.probe.pending(0.0) for rank in ranks] == [[], [], []]
        outcomes = [rank.probe.conclude() for rank in ranks]
        assert [outcome.members for outcome in outcomes] == [(1,), (0,), ()]
        assert "cannot join on lo: bind: Address already in use" in outcomes[2].description
        assert [rank.lanes[0].group_descriptor >= 0 for rank in ranks] == [True, True, False]


def test_too_few_members_are_left_to_unicast() -> None:
    with three_ranks() as ranks:
        ranks[2].begin(ranks, "there is no interface")
        for rank in ranks[:2]:
            rank.begin(ranks)
        talk(ranks)
        outcome = ranks[0].probe.conclude()
        assert (outcome.members, outcome.unheard) == ((), (2,))
        assert outcome.description.startswith("no multicast: 1 of 2 peers hear it on lo")
        assert ranks[0].lanes[0].group_descriptor >= 0  # it hears rank 1, which may have more


def test_one_that_joins_late_hears_the_next_hello() -> None:
    with three_ranks() as ranks:
        for rank in ranks[:2]:
            rank.begin(ranks)
        talk(ranks[:2])
        assert ranks[0].probe.pending(0.0) == [2]
        ranks[2].begin(ranks)
        talk(ranks, now=1.0)
        talk(ranks, now=1.0 + _PATIENCE_S / 2)
        assert [rank.probe.pending(1.0 + _PATIENCE_S / 2) for rank in ranks] == [[], [], []]


def test_a_path_without_multicast_takes_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "_take_hello", lambda *_: None)  # as if none came
    with three_ranks() as ranks:
        for rank in ranks:
            rank.begin(ranks)
        talk(ranks, now=5.0)
        talk(ranks, now=5.0 + 0.99 * _PATIENCE_S)
        assert ranks[0].probe.pending(5.0 + 0.99 * _PATIENCE_S) == [1, 2]
        talk(ranks, now=5.0 + 1.1 * _PATIENCE_S)
        assert ranks[0].probe.pending(5.0 + 1.1 * _PATIENCE_S) == []
        assert ranks[0].probe.conclude().members == ()
        assert ranks[0].lanes[0].group_descriptor == -1  # it has nothing to hear


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_is_stopped_for_long_still_finds_that_all_hear_each_other(stopped: int) -> None:
    """All have said that they have heard nothing yet. Then one does not run until all patience is over."""
    with three_ranks() as ranks:
        for rank in ranks:
            rank.begin(ranks)
        for rank, peer in itertools.permutations(ranks, 2):
            rank.probe._tell(peer.instance, 0)
        for rank in ranks:
            rank.probe.receive(5.0)
        running = [rank for rank in ranks if rank.rank != stopped]
        talk(running, now=5.0)
        later = 5.0 + 10 * _PATIENCE_S
        talk(running, now=later)
        assert [rank.probe.pending(later) for rank in running] == [[stopped]] * 2
        assert ranks[stopped].probe.pending(later) == [rank.rank for rank in running]
        talk(ranks, now=later)
        assert [rank.probe.pending(later) for rank in ranks] == [[], [], []]
        assert all(len(rank.probe.conclude().members) == 2 for rank in ranks)


def test_a_question_is_answered_after_the_hello_that_came_before_it() -> None:
    with three_ranks() as ranks:
        for rank in ranks:
            rank.begin(ranks)
        ranks[0].probe.send(0.0)
        ranks[1].probe.receive(0.0)
        states = [_MESSAGE.unpack(ranks[0].post.recv(_MESSAGE.size))[-1] for _ in range(2)]
        assert states == [multicast_probe._State.HEARD] * 2  # of the hello, and of the question


def test_a_packet_of_the_group_is_left_for_the_engine() -> None:
    with three_ranks() as ranks:
        for rank in ranks:
            rank.begin(ranks)
        header = _native.Header()
        header.type, header.group_tag, header.source = 2, TAG, 1
        packet = header.pack()
        send_from(ranks[1].lanes[0], b"not a packet")
        send_from(ranks[1].lanes[0], packet)
        assert [rank.probe.receive(0.0) for rank in ranks] == [True, False, True]
        assert come_to(ranks[0].lanes[0]) == [packet]


def test_a_peer_that_says_nothing_is_waited_for_longer_but_not_for_ever() -> None:
    with three_ranks() as ranks:
        for rank in ranks:
            rank.begin(ranks)
        talk(ranks[:2], now=5.0)
        assert ranks[0].probe.pending(5.0 + 0.99 * _SILENCE_S) == [2]
        assert ranks[0].probe.pending(5.0 + 1.01 * _SILENCE_S) == []


def test_hostile_hellos_and_answers_change_nothing() -> None:
    def hello(to: bytes, sender: bytes, lane: int = 0, stated: int = 100) -> bytes:
        return _MESSAGE.pack(_HELLO, to, sender, lane, stated).ljust(100, b"\0")

    with three_ranks() as ranks, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(LOOPBACK))
        for rank in ranks:
            rank.begin(ranks)
        me, peer = ranks[0].instance, ranks[1].instance
        everybody = _everybody(TAG)
        for datagram in (
            b"",
            b"tailcut*",
            bytes(60_000),
            hello(_everybody(TAG + 1), peer),  # of another group
            hello(everybody, b"?" * 16),  # of nobody
            hello(everybody, me),
            hello(everybody, peer, lane=1),
            hello(everybody, peer, stated=9000),  # cut on the way
        ):
            stranger.sendto(datagram, (ADDRESS, PORT))
        for datagram in (
            b"",
            _MESSAGE.pack(_STATE, b"?" * 16, peer, 0, 2),  # to an earlier life
            _MESSAGE.pack(_STATE, me, b"?" * 16, 0, 2),
            _MESSAGE.pack(_STATE, me, peer, 1, 2),  # a lane that does not exist
            _MESSAGE.pack(_STATE, me, peer, 0, 7),  # a state that does not exist
            _MESSAGE.pack(_STATE, me, peer, 0, 2) + b"\0",
            _MESSAGE.pack(multicast_probe._QUESTION, me, b"?" * 16, 0, 0),
        ):
            stranger.sendto(datagram, ranks[0].post.getsockname())
        ranks[0].probe.receive(0.0)
        assert ranks[0].probe.heard_from == {}
        assert ranks[0].probe.pending(0.0) == [1, 2]
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(65_535)  # who is not known gets no answer


# ---- groups ------------------------------------------------------------------------------------------------


def says(group: Group) -> str:
    """Of multicast, in what the group says of itself."""
    found = re.search(r"(no )?multicast(:| to)[^;]*", group.describe())
    assert found
    return found[0]


@pytest.mark.parametrize(
    ("ranks", "config", "expected"),
    [
        (3, {}, "multicast to 2 of 2 peers on lo, ttl 1"),
        (
            3,
            {"lanes": 3, "multicast_ttl": 4},
            "multicast to 2 of 2 peers on lo, ttl 4",
        ),
        (2, {"multicast": "on"}, "multicast to 1 of 1 peers on lo, ttl 1"),
        (2, {}, "no multicast: too few ranks to gain"),
        (3, {"multicast": "off"}, "no multicast: it is off"),
    ],
)
def test_a_group_says_what_it_will_do(tmp_path: Path, ranks: int, config: dict, expected: str) -> None:
    with open_groups(tmp_path, ranks, **config) as groups:
        for group in groups:
            assert says(group) == expected
        assert {r.status for r in allreduce(groups, vectors(ranks, 1000))} == {"complete"}


def test_several_groups_at_a_time_keep_apart(tmp_path: Path) -> None:
    with open_groups(tmp_path / "a", 3) as first, open_groups(tmp_path / "b", 3) as second:
        for groups in (first, second):
            assert {r.status for r in allreduce(groups, vectors(3, 1000))} == {"complete"}
            assert {says(group).startswith("multicast to 2 of 2 peers") for group in groups} == {True}


# ---- between hosts -----------------------------------------------------------------------------------------

WORKER = """
import sys
from tailcut import Config, FileStore, Group
import numpy as np

rank, ranks, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with Group(rank, ranks, FileStore(directory), Config(rendezvous_s=20)) as group:
    array = np.full(1000, rank, np.float32)
    status = group.allreduce(array).wait().status
    print(group.describe().split("bytes granted, ")[1].split(";")[0], "|", status, flush=True)
"""


def run_group(testbed: Bed, directory: Path, places: list[int], **env: str) -> list[str]:
    """One rank on each of these hosts; what each says of multicast."""
    workers = [
        testbed.spawn(
            host,
            [sys.executable, "-c", WORKER, str(rank), str(len(places)), str(directory)],
            env=env,
            stdout=subprocess.PIPE,
        )
        for rank, host in enumerate(places)
    ]
    lines = [worker.communicate(timeout=LIMIT_S)[0].decode().strip() for worker in workers]
    said = [line.partition(" | ") for line in lines]
    assert [status for _, _, status in said] == ["complete"] * len(places)
    return [text for text, _, _ in said]


@contextlib.contextmanager
def sniffer(namespace: str, link: str) -> Iterator[socket.socket]:
    """Sees every frame on a link of a namespace, in and out."""
    with (
        inside(namespace),
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003)) as opened,
    ):
        opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)  # for the op's means, too
        opened.bind((link, 0x0003))
        opened.setblocking(False)
        yield opened


def multicasts(seen: socket.socket) -> set[tuple[str, int]]:
    """Source and TTL of the UDP datagrams to 239/8 that were seen."""
    found = set()
    with contextlib.suppress(BlockingIOError):
        while True:
            packet = seen.recv(65_535)
            if len(packet) >= 28 and packet[0] >> 4 == 4 and packet[9] == 17 and packet[16] == 239:
                found.add((socket.inet_ntoa(packet[12:16]), packet[8]))
    return found


@needs_root
def test_over_a_bridge_all_hosts_hear_each_other(tmp_path: Path) -> None:
    with Bed.up(HostScenario(name="bridge", hosts=4)) as testbed:
        for text in run_group(testbed, tmp_path, [0, 1, 2, 3]):
            assert text == "multicast to 3 of 3 peers on eth0, ttl 1"


@needs_root
def test_ranks_of_one_host_are_members_if_they_are_reached_by_the_interface(tmp_path: Path) -> None:
    """Reached over loopback, they are not: rank 2 alone has two peers on its interface."""
    with Bed.up(HostScenario(name="shared", hosts=2)) as testbed:
        bound = run_group(testbed, tmp_path / "a", [0, 0, 1], TAILCUT_SOCKET_IFNAME="eth0")
        assert all(text.startswith("multicast to 2 of 2 peers") for text in bound)
        loose = run_group(testbed, tmp_path / "b", [0, 0, 1], GLOO_SOCKET_IFNAME="")
        assert [re.split(" hear| on", text)[0] for text in loose] == [
            "no multicast: 1 of 2 peers",
            "no multicast: 1 of 2 peers",
            "multicast to 2 of 2 peers",
        ]


@needs_root
def test_a_host_that_nobody_hears_is_the_only_one_to_send_by_unicast(tmp_path: Path) -> None:
    with Bed.up(HostScenario(name="mute", hosts=3)) as testbed:
        subprocess.run(
            ["ip", "netns", "exec", testbed.hosts[0].namespace, "tc", "qdisc", "del", "dev", "eth0", "root"],
            check=True,
        )
        drop_leaving(testbed.hosts[0].namespace, "eth0", "u8 17 0xff at 9", "u8 239 0xff at 16")
        texts = run_group(testbed, tmp_path, [0, 1, 2])
        assert texts[0].startswith("no multicast: 0 of 2 peers hear it on eth0")
        assert all(text.startswith("multicast to 2 of 2 peers") for text in texts[1:])


@needs_root
@pytest.mark.parametrize(("ttl", "named"), [(1, ""), (3, "eth0")])
def test_multicast_keeps_to_its_interface_and_ttl(tmp_path: Path, ttl: int, named: str) -> None:
    """Every host has a second link, which the routing table has for all multicast."""
    with Bed.up(HostScenario(name="confined", hosts=3)) as testbed:
        for host in testbed.hosts:
            for line in (
                "link add side0 type veth peer name side1",
                "addr add 10.99.0.1/24 dev side0",
                "link set side0 addrgenmode none up",
                "link set side1 addrgenmode none up",
                "route replace 224.0.0.0/4 dev side0",
            ):
                subprocess.run(["ip", "-n", host.namespace, *line.split()], check=True)
        with contextlib.ExitStack() as stack:
            side, main = (
                [stack.enter_context(sniffer(host.namespace, link)) for host in testbed.hosts]
                for link in ("side1", "eth0")
            )
            texts = run_group(
                testbed, tmp_path, [0, 1, 2], GLOO_SOCKET_IFNAME=named, TAILCUT_MULTICAST_TTL=str(ttl)
            )
            assert all(text.endswith(f"on eth0, ttl {ttl}") for text in texts)
            expected = {(host.address, ttl) for host in testbed.hosts}
            for near, away in zip(main, side, strict=True):
                assert multicasts(near) == expected
                assert multicasts(away) == set()
