"""Finds out who hears this rank's multicast, and whom this rank hears.

Every rank sends hellos of full size to the multicast group, and asks its peers by unicast whether they came.
Owns the bytes of these messages. The handshake tells it the time and when to read. Knows no store.
"""

from __future__ import annotations

import enum
import ipaddress
import socket
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tailcut import _native
from tailcut.meeting.addresses import Source, interface_name
from tailcut.meeting.multicast import Medium, Multicast, group_address

_HELLO, _QUESTION, _STATE = b"tailcut*", b"tailcut~", b"tailcut="
_MESSAGE = struct.Struct("<8s16s16sHH")  # kind, to, from, lane, bytes of the hello, state, or last question
_LARGEST = 65_535
_MOST = 256
"""The most datagrams that are read at once, so that a flood cannot keep this rank from its deadline."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
_PATIENCE_S = 0.6
"""How long hellos may take to reach a peer that has joined. Switches learn of it from its IGMP report. Then
the last question is due. Its answer ends the wait and not the clock, which also runs while a rank cannot."""
_SILENCE_S = 10.0
"""How long a peer may take to answer at all. It was confirmed, so it joins as soon as it gets to run."""


@dataclass(frozen=True)
class Peer:
    """A peer to ask."""

    rank: int
    address: tuple[str, int]
    """Where its post listens."""


class _State(enum.IntEnum):
    """What a rank says about the hellos of a peer."""

    ABSENT = 0
    """The rank that says so is not a member."""
    UNHEARD = 1
    HEARD = 2
    DEAF = 3
    """Unheard, in answer to a last question."""


class Probe:
    """One rank's side of the questions. It uses the sockets of the lanes."""

    def __init__(
        self,
        lanes: Sequence[_native.UdpLane],
        senders: Sequence[socket.socket],
        post: socket.socket,
        instance: bytes,
        group_tag: int,
        peers: Mapping[bytes, Peer],
        medium: Medium | str,
    ) -> None:
        """``senders`` are the sockets of the lanes, ``peers`` are all other ranks by instance. Questions and
        answers use ``post``, because a late one must not reach an engine. If ``medium`` is the reason why
        there is none, this rank is not a member and only says so."""
        self._lanes = lanes
        self._senders = senders
        self._post = post
        self._instance = instance
        self._tags = [(group_tag + lane) % _native.TAGS for lane in range(len(lanes))]
        self._peers = peers
        self.heard_from: dict[tuple[bytes, int], Source] = {}
        """By instance and lane, where its multicast comes from."""
        self._answers: dict[bytes, dict[int, _State]] = {}
        """What each peer has answered, by instance and lane."""
        self._answered_at: dict[bytes, float] = {}
        """When each peer answered first. From then on it is known to take part, as a member or not."""
        self._begun_at: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self.send_at = 0.0
        """The next time at which ``send`` has something to do."""
        self._members: list[socket.socket] = []
        """The sockets that receive multicast: one for each lane, or none."""
        self._medium, self._reason = self._join(medium)
        if self._medium:
            self._answers = {i: {} for i, peer in peers.items() if peer.rank in self._medium.peers}

    def close(self) -> None:
        for member in self._members:
            member.close()
        self._members = []

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """All sockets at which messages of the probe come in."""
        return [self._post, *self._members]

    def _join(self, medium: Medium | str) -> tuple[Medium | None, str]:
        if isinstance(medium, str):
            self._leave()
            return None, medium
        for lane, lane_tag in zip(self._lanes, self._tags, strict=True):
            address, port = group_address(lane_tag)
            try:
                lane.join_multicast(
                    _number(address), port, _number(medium.interface), medium.ttl, medium.loop
                )
            except RuntimeError as error:  # std::system_error: the port is taken, or multicast is impossible
                self._leave()
                return None, f"cannot join on {interface_name(medium.interface)}: {error}"
            member = socket.fromfd(lane.group_descriptor, socket.AF_INET, socket.SOCK_DGRAM)
            self._members.append(member)
        return medium, ""

    def _leave(self) -> None:
        self.close()
        for lane in self._lanes:
            lane.leave_multicast()

    def send(self, now: float) -> None:
        """When it is time, send a hello to the group and a question to each peer that lacks some lane."""
        if not self._medium or now < self.send_at or not self.pending(now):
            return
        if self._begun_at is None:
            self._begun_at = now
        self.send_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        for lane, lane_tag in enumerate(self._tags):
            size = max(self._medium.packet_bytes, _MESSAGE.size)
            hello = self._message(_HELLO, _everybody(lane_tag), lane, size)
            _send(self._senders[lane], hello.ljust(size, b"\0"), group_address(lane_tag))
        for instance in self._answers:
            if not self._hears(instance):
                last = instance in self._answered_at and now >= self._answered_at[instance] + _PATIENCE_S
                for lane in range(len(self._lanes)):
                    question = self._message(_QUESTION, instance, lane, last)
                    _send(self._post, question, self._peers[instance].address)

    def receive(self, now: float) -> bool:
        """Take what has come. True if there is a packet of the group itself, which stays for the engine."""
        letters = [datagram for datagram, _ in _waiting(self._post)]
        begun = False
        for lane, member in enumerate(self._members):
            for datagram, source in _waiting(member, socket.MSG_PEEK):
                if belongs(datagram, self._tags[lane : lane + 1]):
                    begun = True
                    break
                member.recv(_LARGEST)
                self._take_hello(lane, datagram, source, now)
        for letter in letters:  # after the hellos, which were sent before the questions about them
            self._take_letter(letter, now)
        return begun

    def _take_hello(self, lane: int, datagram: bytes, source: Source, now: float) -> None:
        if len(datagram) < _MESSAGE.size:
            return
        kind, to, sender, stated_lane, size = _MESSAGE.unpack_from(datagram)
        meant = kind == _HELLO and to == _everybody(self._tags[lane]) and stated_lane == lane
        known = sender not in self._peers or (sender, lane) in self.heard_from
        if meant and size == len(datagram) and not known:
            self.heard_from[sender, lane] = source
            self._tell(sender, lane)
            if sender in self._answers and not self._hears(sender):  # it may have joined after our last hello
                self.send_at = min(self.send_at, now + _FIRST_PAUSE_S)

    def _take_letter(self, datagram: bytes, now: float) -> None:
        if len(datagram) != _MESSAGE.size:
            return
        kind, to, sender, lane, value = _MESSAGE.unpack(datagram)
        if to != self._instance or sender not in self._peers or lane >= len(self._lanes):
            return
        if kind == _QUESTION:
            self._tell(sender, lane, last=value == 1)
        elif kind == _STATE and sender in self._answers and value in list(_State):
            self._answers[sender][lane] = _State(value)
            self._answered_at.setdefault(sender, now)

    def _tell(self, peer: bytes, lane: int, *, last: bool = False) -> None:
        """Answer a peer at its known address, whatever source its datagram claims."""
        if not self._members:
            state = _State.ABSENT
        elif (peer, lane) in self.heard_from:
            state = _State.HEARD
        else:
            state = _State.DEAF if last else _State.UNHEARD
        _send(self._post, self._message(_STATE, peer, lane, state), self._peers[peer].address)

    def pending(self, now: float) -> list[int]:
        """The ranks to wait for. All others hear every lane, say that they do not, or say nothing at all."""
        silent = self._begun_at is not None and now >= self._begun_at + _SILENCE_S
        return [
            self._peers[instance].rank
            for instance, answers in self._answers.items()
            if not self._hears(instance)
            and not {_State.ABSENT, _State.DEAF} & set(answers.values())
            and not (silent and instance not in self._answered_at)
        ]

    def _hears(self, instance: bytes) -> bool:
        answers = self._answers[instance]
        return len(answers) == len(self._lanes) and set(answers.values()) == {_State.HEARD}

    def conclude(self) -> Multicast:
        """The outcome. A rank that neither reaches nor hears anybody leaves the group."""
        if not self._medium:
            return Multicast((), (), 0, "", f"no multicast: {self._reason}")
        medium = self._medium
        members = tuple(sorted(self._peers[i].rank for i in self._answers if self._hears(i)))
        unheard = tuple(rank for rank in medium.peers if rank not in members)
        reached = f"{len(members)} of {len(self._peers)} peers"
        where = f"on {interface_name(medium.interface)}, ttl {medium.ttl}"
        if len(members) >= medium.fewest_members:
            payload_bytes = medium.packet_bytes - _native.HEADER_BYTES
            found = f"multicast to {reached} {where}"
            return Multicast(members, unheard, payload_bytes, medium.interface, found)
        if not self.heard_from:
            self._leave()
        return Multicast((), unheard, 0, "", f"no multicast: {reached} hear it {where}")

    def _message(self, kind: bytes, to: bytes, lane: int, value: int) -> bytes:
        return _MESSAGE.pack(kind, to, self._instance, lane, value)


def belongs(datagram: bytes, tags: Collection[int]) -> bool:
    """Whether the datagram is a packet with one of these tags."""
    header, _ = _native.parse_header(datagram)
    return header is not None and header.group_tag in tags


def _send(sender: socket.socket, datagram: bytes, to: tuple[str, int]) -> None:
    with suppress(OSError):  # no route, or a full socket: it counts as lost
        sender.sendto(datagram, to)


def _waiting(incoming: socket.socket, flags: int = 0) -> Iterator[tuple[bytes, Source]]:
    """The datagrams that have come, at most ``_MOST``, with where they came from."""
    with suppress(OSError):  # the socket is empty
        for _ in range(_MOST):
            yield incoming.recvfrom(_LARGEST, socket.MSG_DONTWAIT | flags)


def _everybody(lane_tag: int) -> bytes:
    """What a hello to all members has in place of an instance."""
    return lane_tag.to_bytes(8, "little").ljust(16, b"\0")


def _number(address: str) -> int:
    return int(ipaddress.IPv4Address(address))
