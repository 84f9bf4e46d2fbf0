"""How the lanes of a rank start: what each peer grants, on which path, with which packets."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from tailcut import _native
from tailcut.codec import CODEC_IDS, trimmed_payload_bytes
from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.grid import GridLayout
from tailcut.meeting.addresses import is_loopback
from tailcut.meeting.roster import Card, Roster, Route


def start_lanes(
    lanes: Sequence[_native.UdpLane],
    *,
    rank: int,
    grid: GridLayout,
    config: Config,
    codec: str,
    terms: _native.Terms,
    roster: Roster,
) -> None:
    """Start the engine thread of every lane."""
    peers = paths_to(config, roster)
    for index, lane in enumerate(lanes):
        if codec == "planes":
            lane.mark(config.dscp)
        lane.start(
            rank=rank,
            ranks=grid.ranks,
            rows=grid.rows,
            seed=config.seed,
            group_tag=(roster.tag + index) % _native.TAGS,
            window_ops=config.window_ops,
            codec=CODEC_IDS[codec],
            resend=config.resend,
            carry=config.late == "carry",
            record_fates=bool(config.ledger),
            pool_bytes=config.pool_bytes,
            window_bytes=roster.cards[rank].window_bytes,
            terms=terms,
            peers=peers,
            addresses=[
                _address(route.address, card.ports[index])
                for card, route in zip(roster.cards, roster.routes, strict=True)
            ],
            sources=[[_address(*source) for source in by_lane[index]] for by_lane in roster.sources],
            members=roster.multicast.members,
            group_path=_multicast_path(config, roster),
        )


def paths_to(config: Config, roster: Roster) -> list[_native.PeerSettings]:
    """By rank: the path to it, and what fits a packet there."""
    return [_path(config, route, [card]) for card, route in zip(roster.cards, roster.routes, strict=True)]


def receive_uncorrected(lanes: Sequence[_native.UdpLane]) -> None:
    """Also receive packets that a switch trims without correcting their lengths."""
    try:
        for lane in lanes:
            lane.receive_trimmed()
    except RuntimeError as error:  # std::system_error
        raise ConfigError(
            f"receive_uncorrected=True needs a packet socket, and there is none ({error}): "
            "grant CAP_NET_RAW, or leave it off if your switch corrects the lengths of what it trims"
        ) from error


def _address(ipv4: str, port: int) -> tuple[int, int]:
    return int(ipaddress.IPv4Address(ipv4)), port


def _multicast_path(config: Config, roster: Roster) -> _native.PeerSettings | None:
    """The path to all members that hear our multicast: each of its limits is the smallest of theirs."""
    multicast = roster.multicast
    if not multicast.members:
        return None
    route = Route(multicast.interface, multicast.payload_bytes)
    return _path(config, route, [roster.cards[member] for member in multicast.members])


def _path(config: Config, route: Route, cards: Sequence[Card]) -> _native.PeerSettings:
    """The path to the ranks with these cards. Nothing on loopback trims, and nothing there needs a pace."""
    local = is_loopback(route.address)
    return _native.PeerSettings(
        min(card.window_bytes for card in cards),
        min(card.pool_bytes for card in cards),
        route.payload_bytes,
        0 if local else trimmed_payload_bytes(config.trim_bytes),
        paced=not local,
    )
