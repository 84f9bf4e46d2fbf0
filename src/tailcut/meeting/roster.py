"""What the ranks of a group know of each other: the card that each publishes, and the route to each.

Owns the card's form in the store. Knows nothing of how ranks meet.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tailcut import _native
from tailcut.config import Config
from tailcut.errors import PeerError
from tailcut.grid import GridLayout
from tailcut.meeting.addresses import (
    LOOPBACK,
    Source,
    host_identity,
    interfaces,
    is_loopback,
    local_address_towards,
)
from tailcut.meeting.multicast import Multicast
from tailcut.meeting.sockets import bind_address


@dataclass(frozen=True)
class Card:
    """What a rank tells the others before the first packet."""

    host: str
    addresses: list[str]
    loopback: bool
    ports: list[int]
    """The UDP port of each lane."""
    window_bytes: int
    """Each sender's share of a lane's socket buffer."""
    pool_bytes: int
    agreed: dict[str, int | str]
    instance: str
    """A random number that tells this start of this rank from every other."""
    post_port: int = 0
    """The UDP port for questions about multicast."""


@dataclass(frozen=True)
class Route:
    """How to reach a peer."""

    address: str
    payload_bytes: int
    """The most that one packet carries."""


@dataclass(frozen=True)
class Roster:
    """All ranks of a group, as this one reaches them."""

    cards: list[Card]
    routes: list[Route]
    tag: int
    """A random number that only members know. It keeps out packets of other groups and earlier starts."""
    multicast: Multicast
    """Who hears this rank's multicast."""
    sources: list[list[set[Source]]]
    """By rank and lane, where a peer's packets come from; of this rank itself none."""

    @property
    def hosts(self) -> int:
        return len({card.host for card in self.cards})


def make_card(
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
        agreed=config.agreed,
        instance=os.urandom(16).hex(),
        post_port=post.getsockname()[1],
    )


def card_text(card: Card) -> bytes:
    """The card as the store holds it."""
    return json.dumps(asdict(card)).encode()


def parse_card(text: bytes, peer: int) -> Card:
    try:
        return Card(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise PeerError(
            f"rank {peer} published something that this version does not understand: {error}"
        ) from None


def local_address(roster: Roster, rank: int) -> str:
    """The address at which every peer reaches this rank: that on the path to a remote peer, if any is."""
    here = roster.cards[rank].host
    remote = [r.address for r, c in zip(roster.routes, roster.cards, strict=True) if c.host != here]
    return (local_address_towards(remote[0]) if remote else None) or LOOPBACK
