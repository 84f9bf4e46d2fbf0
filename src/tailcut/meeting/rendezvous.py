"""How ranks find each other: every rank publishes one card in the store, reads all the others, and confirms
each peer by a live handshake. The store may hold cards of an earlier life: they do not answer, and are read
again until they do. Owns the cards, the routes and the group's tag. Knows nothing of ops.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tailcut import _native
from tailcut.config import Config
from tailcut.errors import ConfigError, PeerError
from tailcut.grid import GridLayout
from tailcut.meeting.addresses import (
    IP_UDP_BYTES,
    LOOPBACK,
    address_of,
    host_identity,
    interfaces,
    is_loopback,
    local_address_towards,
    multicast_mtu_bytes,
    path_mtu_bytes,
)
from tailcut.meeting.handshake import Candidate, Contact, Handshake
from tailcut.meeting.multicast import (
    Medium,
    Multicast,
    choose_interface,
    fewest_members,
    group_address,
    refusal,
)
from tailcut.meeting.multicast_probe import Peer, Probe
from tailcut.store import Store, try_get

_GRANULE_BYTES = 4 * _native.GRANULE
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


@dataclass(frozen=True)
class Card:
    """What a rank tells the others before the first packet."""

    host: str
    addresses: list[str]
    loopback: bool
    ports: list[int]
    """One for each lane."""
    window_bytes: int
    """Each sender's share of a lane's socket buffer."""
    pool_bytes: int
    agreed: dict[str, int | str]
    instance: str
    """Random: this life of this rank."""
    post_port: int = 0
    """For questions about multicast."""


@dataclass(frozen=True)
class Route:
    """How to reach a peer."""

    address: str
    payload_bytes: int
    """The most that one packet carries."""


@dataclass(frozen=True)
class Roster:
    cards: list[Card]
    routes: list[Route]
    tag: int
    """Random, 64 bits, known to the members only: keeps packets of others and of earlier lives out."""
    multicast: Multicast
    """Who hears this rank's multicast."""

    @property
    def hosts(self) -> int:
        return len({card.host for card in self.cards})


def bind_address(config: Config) -> str:
    """The address to bind and publish; empty for any."""
    return config.address or (address_of(config.socket_ifname) if config.socket_ifname else "")


def open_lane(address: str, config: Config) -> _native.UdpLane:
    """A socket on an address, or on any if it is empty."""
    try:
        bind_ipv4 = int(ipaddress.IPv4Address(address or "0.0.0.0"))
        return _native.UdpLane(bind_ipv4, config.receive_buffer_bytes, config.offload)
    except RuntimeError as error:  # std::system_error
        raise ConfigError(f"cannot open a UDP socket on {address or 'any address'}: {error}") from error


def open_lanes(config: Config) -> list[_native.UdpLane]:
    """The sockets of a rank, one for each lane."""
    bound = bind_address(config)
    return [open_lane(bound, config) for _ in range(config.lanes)]


def _make_card(
    config: Config, lanes: Sequence[_native.UdpLane], grid: GridLayout, post: socket.socket
) -> Card:
    bound = bind_address(config)
    buffer_bytes = min(lane.receive_buffer_bytes for lane in lanes)
    return Card(
        host=host_identity(),
        addresses=[bound] if bound else [a for a in interfaces().values() if not is_loopback(a)],
        loopback=bound in ("", LOOPBACK),
        ports=[lane.port for lane in lanes],
        window_bytes=_native.credit_window_bytes(buffer_bytes, grid.senders),
        pool_bytes=config.pool_bytes,
        # Every row encodes the same mean.
        agreed=config.agreed | ({"planes": config.planes} if grid.rows > 1 else {}),
        instance=os.urandom(16).hex(),
        post_port=post.getsockname()[1],
    )


def local_address(roster: Roster, rank: int) -> str:
    """The address at which every peer reaches this rank: that on the way to a remote one, if any is."""
    here = roster.cards[rank].host
    remote = [r.address for r, c in zip(roster.routes, roster.cards, strict=True) if c.host != here]
    return (local_address_towards(remote[0]) if remote else None) or LOOPBACK


def meet(
    store: Store,
    name: str,
    rank: int,
    grid: GridLayout,
    lanes: Sequence[_native.UdpLane],
    config: Config,
) -> Roster:
    """Publish our card, read everybody's, agree, shake hands. Raises PeerError naming who did not come."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as post:
        post.bind((bind_address(config), 0))
        card = _make_card(config, lanes, grid, post)
        meeting = _Meeting(store, name, rank, grid, card, config)
        with Handshake(lanes, post, bytes.fromhex(card.instance)) as handshake:
            return meeting.hold(handshake)


class _Meeting:
    """One rendezvous in progress."""

    def __init__(
        self, store: Store, name: str, rank: int, grid: GridLayout, card: Card, config: Config
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._grid = grid
        self._world_size = grid.ranks
        self._card = card
        self._config = config
        self._cards: dict[int, Card] = {rank: card}
        self._contacts: dict[int, Contact] = {}
        self._probed: int | None = None
        self._announced: int | None = None
        """Tags."""

    def hold(self, handshake: Handshake) -> Roster:
        self._store.set(self._card_key(self._rank), json.dumps(asdict(self._card)).encode())
        give_up = time.monotonic() + self._config.rendezvous_s
        pause_s = _FIRST_PAUSE_S
        waiting = [r for r in range(self._world_size) if r != self._rank]
        while True:
            self._read_cards(waiting)
            handshake.contacts = {contact.instance: contact for contact in self._contacts.values()}
            handshake.send_hellos(time.monotonic())
            waiting = self._unconfirmed()
            tag = None if waiting else self._tag()
            if tag is not None:
                waiting = self._get_ready(handshake, tag)
                if not waiting:
                    # The last hellos, which the engine should not meet.
                    handshake.listen(self._packet_tags(tag), 0.0)
                    self._check_agreement()
                    assert handshake.probe
                    return self._roster(handshake.probe, tag)
            now = time.monotonic()
            if now >= give_up:
                raise PeerError(self._complaint(waiting))
            tags = None if tag is None else self._packet_tags(tag)
            if handshake.probe and tag not in (None, self._announced):
                handshake.listen(tags, max(0.0, handshake.probe.send_at - now))
            else:
                handshake.listen(tags, pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _get_ready(self, handshake: Handshake, tag: int) -> list[int]:
        """All are confirmed: find out who hears our multicast, then say that we are ready. Who is still to be
        waited for; none when all are ready."""
        if handshake.probe is None or tag != self._probed:
            self._begin_probe(handshake, tag)
            self._probed = tag
        assert handshake.probe
        handshake.probe.send(time.monotonic())
        begun = handshake.listen(self._packet_tags(tag), 0.0)
        if tag != self._announced:
            if pending := handshake.probe.pending(time.monotonic()):
                return pending
            self._store.set(self._ready_key(tag, self._rank), b"1")
            self._announced = tag
        return [] if begun else self._not_ready(tag)

    def _read_cards(self, peers: list[int]) -> None:
        """A card that has changed replaces that of an earlier life."""
        for peer in [self._rank, *peers]:
            text = try_get(self._store, self._card_key(peer))
            if text is None:
                continue
            card = _parse(text, peer)
            if peer not in self._cards or card.instance != self._cards[peer].instance:
                if peer == self._rank:
                    raise ConfigError(
                        f"another process has joined group {self._name!r} as rank {peer}: "
                        "ranks must differ, and two groups at a time need two names or two stores"
                    )
                self._cards[peer] = card
                self._contacts[peer] = self._contact(card)

    def _contact(self, card: Card) -> Contact:
        addresses = card.addresses
        if card.host == self._card.host and card.loopback and self._card.loopback:
            addresses = [LOOPBACK]
        candidates = []
        too_small: ConfigError | None = None
        for address in addresses:
            mtu_bytes = path_mtu_bytes(address)
            if mtu_bytes is None:
                continue
            try:
                largest = payload_bytes(address, mtu_bytes, card.window_bytes, self._config)
            except ConfigError as error:
                too_small = error
                continue
            candidates.append(Candidate(address, _native.HEADER_BYTES + largest))
        if too_small and not candidates:
            raise too_small
        ports = card.ports[: len(self._card.ports)]  # that their number differs is told when all are there
        return Contact(bytes.fromhex(card.instance), ports, candidates)

    def _unconfirmed(self) -> list[int]:
        return [
            r
            for r in range(self._world_size)
            if r != self._rank and not (r in self._contacts and self._contacts[r].confirmed)
        ]

    def _differing(self) -> list[str]:
        """What the ranks must agree on and do not."""
        cards = [self._cards[r] for r in range(self._world_size)]
        return sorted(
            f"{field}: " + ", ".join(f"rank {r} has {c.agreed.get(field)}" for r, c in enumerate(cards))
            for field in self._card.agreed
            if any(c.agreed.get(field) != self._card.agreed[field] for c in cards)
        )

    def _check_agreement(self) -> None:
        if differing := self._differing():
            raise ConfigError(f"the ranks of group {self._name!r} must agree on " + "; ".join(differing))

    def _tag(self) -> int:
        instances = "".join(self._cards[r].instance for r in range(self._world_size))
        return int.from_bytes(hashlib.blake2b(instances.encode(), digest_size=6).digest(), "little")

    def _packet_tags(self, tag: int) -> list[list[int]]:
        """By lane, the tags of packets that may come once the group with this tag has begun."""
        lane_tags = [(tag + lane) % _native.TAGS for lane in range(len(self._card.ports))]
        return [_native.grid_tags(t, self._rank, self._world_size, self._grid.rows) for t in lane_tags]

    def _not_ready(self, tag: int) -> list[int]:
        return [
            r
            for r in range(self._world_size)
            if r != self._rank and try_get(self._store, self._ready_key(tag, r)) is None
        ]

    def _routes(self) -> list[Route]:
        routes = []
        for rank in range(self._world_size):
            if rank == self._rank:
                routes.append(Route(LOOPBACK, 0))
                continue
            confirmed = self._contacts[rank].confirmed
            assert confirmed is not None
            routes.append(Route(confirmed.address, confirmed.packet_bytes - _native.HEADER_BYTES))
        return routes

    def _begin_probe(self, handshake: Handshake, tag: int) -> None:
        routes = self._routes()
        peers = {
            contact.instance: Peer(rank, (routes[rank].address, self._cards[rank].post_port))
            for rank, contact in self._contacts.items()
        }
        config = self._config
        reason = "the ranks disagree" if self._differing() else refusal(config.multicast, self._world_size)
        medium = reason or self._medium(routes, group_address(tag)[0])
        handshake.begin_probe(tag, peers, medium)

    def _medium(self, routes: list[Route], group: str) -> Medium | str:
        """Where this rank may multicast, or why it cannot."""
        towards = {rank: local_address_towards(routes[rank].address) for rank in self._contacts}
        local = {rank: address for rank, address in towards.items() if address}
        interface, peers = choose_interface(local, bind_address(self._config))
        mtu_bytes = multicast_mtu_bytes(group, interface) if peers else None
        if mtu_bytes is None:
            return f"{interface or 'no interface'} cannot send it"
        payload = min(routes[rank].payload_bytes for rank in peers)
        largest = min(_native.HEADER_BYTES + payload, mtu_bytes - IP_UDP_BYTES)
        loop = any(self._cards[rank].host == self._card.host for rank in peers)
        fewest = fewest_members(self._config.multicast)
        return Medium(interface, self._config.multicast_ttl, largest, peers, loop, fewest)

    def _roster(self, probe: Probe, tag: int) -> Roster:
        cards = [self._cards[r] for r in range(self._world_size)]
        return Roster(cards, self._routes(), tag, probe.conclude())

    def _complaint(self, waiting: list[int]) -> str:
        text = (
            f"group {self._name!r}: rank {self._rank} waited {self._config.rendezvous_s:g} s "
            f"for {self._world_size - 1} peers."
        )
        absent = [r for r in waiting if r not in self._cards]
        if absent:
            text += (
                f" Ranks {absent} did not come: are they running, with the same store, name and world_size?"
            )
        for rank in waiting:
            if rank in self._contacts and not self._contacts[rank].confirmed:
                text += " " + _why_not(rank, self._cards[rank], self._contacts[rank])
        if waiting and not self._unconfirmed():
            text += f" All answered here, but ranks {waiting} did not hear all of their peers."
        return text

    def _card_key(self, rank: int) -> str:
        return f"tailcut/{self._name}/{rank}"

    def _ready_key(self, tag: int, rank: int) -> str:
        return f"tailcut/{self._name}/{tag:016x}/{rank}"


def _why_not(rank: int, card: Card, contact: Contact) -> str:
    ports = ", ".join(map(str, card.ports))
    if not contact.candidates:
        return (
            f"There is no route to rank {rank}, which published {card.addresses or 'no address'}: set "
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


def payload_bytes(address: str, mtu_bytes: int, window_bytes: int, config: Config) -> int:
    """The most that one packet carries: what the path does in one datagram, and the peer's window holds."""
    largest = min(mtu_bytes - IP_UDP_BYTES, 65_507) - _native.HEADER_BYTES
    if config.packet_bytes > largest:
        raise ConfigError(
            f"packet_bytes={config.packet_bytes} exceeds the {largest} bytes that the path to "
            f"{address} carries (MTU {mtu_bytes}); lower it or raise the MTU"
        )
    return config.packet_bytes or min(largest, 61_440, max(_GRANULE_BYTES, window_bytes - 2048))


def _parse(text: bytes, peer: int) -> Card:
    try:
        return Card(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise PeerError(
            f"rank {peer} published something that this version does not understand: {error}"
        ) from None
