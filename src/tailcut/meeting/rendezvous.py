"""How ranks find each other: every rank publishes a card in the store, reads all others, and shakes hands.

The store may hold cards of an earlier start. Nobody answers behind those, so they are read again until
somebody does. Owns the group's tag. Knows nothing of ops.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence

from tailcut import _native
from tailcut.config import Config
from tailcut.errors import ConfigError, PeerError
from tailcut.grid import GridLayout
from tailcut.meeting.addresses import (
    IP_UDP_BYTES,
    LOOPBACK,
    local_address_towards,
    multicast_mtu_bytes,
    path_mtu_bytes,
)
from tailcut.meeting.handshake import Candidate, Contact, Handshake, why_unconfirmed
from tailcut.meeting.multicast import (
    Medium,
    choose_interface,
    fewest_members,
    group_address,
    refusal,
)
from tailcut.meeting.multicast_probe import Peer, Probe
from tailcut.meeting.roster import Card, Roster, Route, card_text, make_card, parse_card
from tailcut.meeting.sockets import bind_address, payload_bytes
from tailcut.store import Store, try_get

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


def meet(
    store: Store,
    name: str,
    rank: int,
    grid: GridLayout,
    lanes: Sequence[_native.UdpLane],
    config: Config,
) -> Roster:
    """Publish our card, read all others, agree, shake hands. A PeerError names who did not come."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as post:
        post.bind((bind_address(config), 0))
        card = make_card(config, lanes, grid, post)
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
        """The tag for which the probe has begun."""
        self._announced: int | None = None
        """The tag for which this rank has said that it is ready."""

    def hold(self, handshake: Handshake) -> Roster:
        self._store.set(self._card_key(self._rank), card_text(self._card))
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
                    # Take the last hellos, so that the engine does not meet them.
                    handshake.listen(self._packet_tags(tag), 0.0)
                    self._check_agreement()
                    assert handshake.probe
                    return self._roster(handshake, handshake.probe, tag)
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
        """When all are confirmed, find out who hears our multicast, and then say that we are ready. Returns
        the ranks that are still to be waited for."""
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
        """A card that has changed replaces the one of an earlier start."""
        for peer in [self._rank, *peers]:
            text = try_get(self._store, self._card_key(peer))
            if text is None:
                continue
            card = parse_card(text, peer)
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
        ports = card.ports[: len(self._card.ports)]  # another number of lanes is an error when all are there
        return Contact(bytes.fromhex(card.instance), ports, candidates)

    def _unconfirmed(self) -> list[int]:
        return [
            r
            for r in range(self._world_size)
            if r != self._rank and not (r in self._contacts and self._contacts[r].confirmed)
        ]

    def _differing(self) -> list[str]:
        """The fields on which the ranks must agree and do not."""
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
        """The tags of the packets that may come when the group with this tag has begun, by lane."""
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

    def _roster(self, handshake: Handshake, probe: Probe, tag: int) -> Roster:
        cards = [self._cards[r] for r in range(self._world_size)]
        sources = [
            [handshake.sources(bytes.fromhex(card.instance), lane) for lane in range(len(card.ports))]
            for card in cards
        ]
        return Roster(cards, self._routes(), tag, probe.conclude(), sources)

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
                text += " " + why_unconfirmed(rank, self._cards[rank].addresses, self._contacts[rank])
        if waiting and not self._unconfirmed():
            text += f" All answered here, but ranks {waiting} did not hear all of their peers."
        return text

    def _card_key(self, rank: int) -> str:
        return f"tailcut/{self._name}/{rank}"

    def _ready_key(self, tag: int, rank: int) -> str:
        return f"tailcut/{self._name}/{tag:016x}/{rank}"
