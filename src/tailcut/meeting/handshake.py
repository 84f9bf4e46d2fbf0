"""The first datagrams between two ranks: is this peer alive at this address, and do full packets pass?

A hello names the instance it is meant for, so that only the process behind the card answers, not an earlier
life of it, a neighbour on a reused port, or this host's own docker0. Knows nothing of stores or ops.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tailcut import _native
from tailcut.meeting.addresses import Source
from tailcut.meeting.multicast import Medium
from tailcut.meeting.multicast_probe import Peer, Probe, belongs

_HELLO, _ANSWER = b"tailcut?", b"tailcut!"
_MESSAGE = struct.Struct("<8s16s16sHHH")  # kind, to, from, lane, candidate, bytes of the hello
_LARGEST = 65_535
_LONGEST_PAUSE_S = 0.25


@dataclass
class Candidate:
    """One address at which a peer may be reached."""

    address: str
    packet_bytes: int
    """The largest datagram that ops will send there."""
    small_answers: set[int] = field(default_factory=set)
    """Lanes that answered a small hello."""
    full_answers: set[int] = field(default_factory=set)
    """Lanes that answered a hello of full size."""


@dataclass
class Contact:
    """A peer as its card describes it, and what was heard from it."""

    instance: bytes
    ports: Sequence[int]
    candidates: list[Candidate]
    hello_at: float = 0.0
    pause_s: float = 0.01

    @property
    def confirmed(self) -> Candidate | None:
        """The first address at which every lane answered a hello of full size."""
        return next((c for c in self.candidates if len(c.full_answers) == len(self.ports)), None)


class Handshake:
    """This rank's side of the handshake. It uses the sockets of the lanes before their engines start."""

    def __init__(self, lanes: Sequence[_native.UdpLane], post: socket.socket, instance: bytes) -> None:
        """``post`` is the socket for the questions and answers of the probe."""
        self._lanes = lanes
        self._sockets = [socket.fromfd(lane.descriptor, socket.AF_INET, socket.SOCK_DGRAM) for lane in lanes]
        self._post = post
        self._instance = instance
        self.contacts: dict[bytes, Contact] = {}
        """The peers by instance."""
        self.heard_from: defaultdict[tuple[bytes, int], set[Source]] = defaultdict(set)
        """By instance and lane, where its hellos came from. It may be reached elsewhere."""
        self.probe: Probe | None = None
        """Finds out who hears whose multicast. It begins when all peers are confirmed."""

    def __enter__(self) -> Handshake:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self._sockets:
            lane.close()
        if self.probe:
            self.probe.close()

    def begin_probe(self, group_tag: int, peers: Mapping[bytes, Peer], medium: Medium | str) -> None:
        """Begin to find out who hears whose multicast. ``listen`` goes on with it."""
        if self.probe:
            self.probe.close()
        self.probe = Probe(self._lanes, self._sockets, self._post, self._instance, group_tag, peers, medium)

    def send_hellos(self, now: float) -> None:
        """Send a small hello and one of full size to every address of every peer that is not confirmed."""
        for contact in self.contacts.values():
            if contact.confirmed or now < contact.hello_at:
                continue
            contact.hello_at = now + contact.pause_s
            contact.pause_s = min(2 * contact.pause_s, _LONGEST_PAUSE_S)
            for index, candidate in enumerate(contact.candidates):
                for lane, port in enumerate(contact.ports):
                    for size in (_MESSAGE.size, max(candidate.packet_bytes, _MESSAGE.size)):
                        hello = self._message(_HELLO, contact.instance, lane, index, size)
                        with suppress(OSError):  # no route, or a full socket: it counts as lost
                            self._sockets[lane].sendto(hello.ljust(size, b"\0"), (candidate.address, port))

    def listen(self, tags: Sequence[Collection[int]] | None, timeout_s: float) -> bool:
        """Answer hellos and take answers for ``timeout_s``. Return earlier when the last peer is confirmed,
        when the probe has finished, or when a packet of the group has come. Only in the last case it is True.

        ``tags`` are the tags of the group's packets, by lane. Such a packet stays in its socket. Its sender
        has seen that everybody is ready, so this rank need not ask.
        """
        give_up = time.monotonic() + timeout_s
        settled_before = self._settled()
        while True:
            left_s = max(0.0, give_up - time.monotonic())
            select.select([*self._sockets, *(self.probe.sockets if self.probe else ())], [], [], left_s)
            begun = [self._drain(lane, tags[lane] if tags else ()) for lane in range(len(self._sockets))]
            if self.probe:
                begun.append(self.probe.receive(time.monotonic()))
            if any(begun):
                return True
            if time.monotonic() >= give_up or (self._settled() and not settled_before):
                return False

    def sources(self, instance: bytes, lane: int) -> set[Source]:
        """Where packets of a peer come from, once all are ready: it sends to an address at which its hellos
        were answered, by unicast or multicast, and so from where they came from."""
        multicast = self.probe.heard_from.get((instance, lane)) if self.probe else None
        return self.heard_from[instance, lane] | ({multicast} if multicast else set())

    def _settled(self) -> bool:
        return all(contact.confirmed for contact in self.contacts.values()) and not (
            self.probe and self.probe.pending(time.monotonic())
        )

    def _drain(self, lane: int, tags: Collection[int]) -> bool:
        incoming = self._sockets[lane]
        while True:
            try:
                datagram = incoming.recv(_LARGEST, socket.MSG_PEEK)
            except OSError:  # the socket is empty
                return False
            if belongs(datagram, tags):
                return True
            with suppress(OSError):
                self._take(lane, *incoming.recvfrom(_LARGEST))

    def _take(self, lane: int, datagram: bytes, source: Source) -> None:
        if len(datagram) < _MESSAGE.size:
            return
        kind, to, sender, peer_lane, index, size = _MESSAGE.unpack_from(datagram)
        if to != self._instance:
            return
        if kind == _HELLO and peer_lane == lane and size == len(datagram):
            self.heard_from[sender, lane].add(source)
            answer = self._message(_ANSWER, sender, lane, index, size)
            with suppress(OSError):
                self._sockets[lane].sendto(answer, source)
        elif kind == _ANSWER and sender in self.contacts:
            contact = self.contacts[sender]
            if index < len(contact.candidates) and peer_lane < len(contact.ports):
                candidate = contact.candidates[index]
                candidate.small_answers.add(peer_lane)
                if size >= candidate.packet_bytes:
                    candidate.full_answers.add(peer_lane)

    def _message(self, kind: bytes, to: bytes, lane: int, index: int, size: int) -> bytes:
        return _MESSAGE.pack(kind, to, self._instance, lane, index, size)


def why_unconfirmed(rank: int, published: Sequence[str], contact: Contact) -> str:
    """For an error message: why there was no handshake with a rank that ``published`` these addresses."""
    ports = ", ".join(map(str, contact.ports))
    if not contact.candidates:
        return (
            f"There is no route to rank {rank}, which published {list(published) or 'no address'}: set "
            "socket_ifname or address on both ranks to a common network."
        )
    for candidate in contact.candidates:
        if candidate.small_answers:
            return (
                f"Rank {rank} at {candidate.address} (UDP port {ports}) answers small packets but none of "
                f"{candidate.packet_bytes} bytes: set packet_bytes to what the path carries."
            )
    tried = ", ".join(candidate.address for candidate in contact.candidates)
    return (
        f"Rank {rank} does not answer at {tried} (UDP port {ports}): is it still running, does a firewall "
        "drop UDP, is it another network (socket_ifname)?"
    )
