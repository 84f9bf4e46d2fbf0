"""One datagram for many: on which interface this rank may multicast, and to which address.

Owns the rules that all ranks come to alike. Sends nothing; who hears it is found out by multicast_probe.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from tailcut.meeting.addresses import is_loopback

_SCOPE = int(ipaddress.IPv4Address("239.192.0.0"))
"""Organization-local, RFC 2365: a /14 that routers keep inside. With TTL 1 nothing passes a router at all."""
_SCOPE_BITS = 18
_FIRST_PORT, _PORTS = 61_000, 4096
"""Above what Linux gives to sockets that bind to any port."""


@dataclass(frozen=True)
class Multicast:
    """What this rank's multicast comes to."""

    members: tuple[int, ...]
    """Ranks that hear it, in order; none: everything goes by unicast."""
    unheard: tuple[int, ...]
    """Ranks that should have, and do not."""
    payload_bytes: int
    """The most that one packet to all members carries."""
    interface: str
    """Address of the interface; empty if there is none."""
    description: str
    """Without the address, which is another one in every life: groups that do alike say alike."""


@dataclass(frozen=True)
class Medium:
    """An interface by which peers may be reached by multicast."""

    interface: str
    """Its address."""
    ttl: int
    packet_bytes: int
    """The largest datagram that ops will send to all."""
    peers: tuple[int, ...]
    """Ranks on the other side."""
    loop: bool
    """Some of them are on this host."""
    fewest_members: int
    """If fewer hear it, everything goes by unicast."""


def fewest_members(mode: str) -> int:
    """To one alone, multicast saves nothing."""
    return 1 if mode == "on" else 2


def refusal(mode: str, ranks: int) -> str:
    """Why a group does not even try; empty if it does. The same on all ranks.

    Measured (docs/multicast.md): sending to and receiving at 3 members on loopback takes 0.6 of the time that
    unicast takes, at 7 members 0.4; behind an uplink of 200 Mbit/s each of 3 members gets three times the
    rate. So loopback is no exception.
    """
    if mode == "off":
        return "it is off"
    return "too few ranks to gain" if ranks - 1 < fewest_members(mode) else ""


def group_address(lane_tag: int) -> tuple[str, int]:
    """Where the members of a lane listen: the same on all ranks, another one for another group."""
    digest = hashlib.blake2b(lane_tag.to_bytes(8, "little"), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    address = ipaddress.IPv4Address(_SCOPE + number % (1 << _SCOPE_BITS))
    return str(address), _FIRST_PORT + (number >> _SCOPE_BITS) % _PORTS


def choose_interface(local: Mapping[int, str], bound: str) -> tuple[str, tuple[int, ...]]:
    """The interface to multicast on, as its address, and the peers there.

    ``local`` is our own address on the way to each peer. The interface is what the sockets are ``bound`` to,
    else the one with the most peers behind it; loopback only if there is no other.
    """
    if bound or not local:
        return bound, tuple(sorted(local))
    behind: dict[str, list[int]] = {}
    for peer, address in sorted(local.items()):
        behind.setdefault(address, []).append(peer)
    best = max(behind, key=lambda address: (not is_loopback(address), len(behind[address])))
    return best, tuple(behind[best])
