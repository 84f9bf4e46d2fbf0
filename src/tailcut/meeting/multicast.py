"""On which interface this rank may multicast, and to which address.

Owns the rules by which all ranks decide alike. Sends nothing: multicast_probe finds out who hears it.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from tailcut.meeting.addresses import is_loopback

_SCOPE = int(ipaddress.IPv4Address("239.192.0.0"))
"""The organization-local scope of RFC 2365, which routers do not let out. With TTL 1 none forwards it."""
_SCOPE_BITS = 18
_FIRST_PORT, _PORTS = 61_000, 4096
"""These ports are above those that Linux gives to sockets that bind to any port."""


@dataclass(frozen=True)
class Multicast:
    """Who hears the multicast of this rank, and on which interface."""

    members: tuple[int, ...]
    """The ranks that hear it, in order. If there are none, everything goes by unicast."""
    unheard: tuple[int, ...]
    """The ranks that should hear it and do not."""
    payload_bytes: int
    """The most that one packet to all members carries."""
    interface: str
    """The address of the interface; empty if there is none."""
    description: str
    """It omits the multicast address, which changes with every start, so that equal groups say the same."""


@dataclass(frozen=True)
class Medium:
    """An interface on which multicast may reach peers."""

    interface: str
    """The address of the interface."""
    ttl: int
    packet_bytes: int
    """The largest datagram that ops will send to all."""
    peers: tuple[int, ...]
    """The ranks behind this interface."""
    loop: bool
    """Whether some of these ranks are on this host."""
    fewest_members: int
    """If fewer ranks hear it, everything goes by unicast."""


def fewest_members(mode: str) -> int:
    """How many members make multicast worth it. To a single one it saves nothing."""
    return 1 if mode == "on" else 2


def refusal(mode: str, ranks: int) -> str:
    """Why a group does not try multicast; empty if it does. The answer is the same on all ranks.

    Loopback is no exception. There 3 members take 0.6 of the time of unicast, and 7 members take 0.4. Behind
    an uplink of 200 Mbit/s each of 3 members gets three times the rate (measured: docs/multicast.md).
    """
    if mode == "off":
        return "it is off"
    return "too few ranks to gain" if ranks - 1 < fewest_members(mode) else ""


def group_address(lane_tag: int) -> tuple[str, int]:
    """Address and port at which the members of a lane listen. All ranks compute the same; groups differ."""
    digest = hashlib.blake2b(lane_tag.to_bytes(8, "little"), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    address = ipaddress.IPv4Address(_SCOPE + number % (1 << _SCOPE_BITS))
    return str(address), _FIRST_PORT + (number >> _SCOPE_BITS) % _PORTS


def choose_interface(local: Mapping[int, str], bound: str) -> tuple[str, tuple[int, ...]]:
    """The address of the interface to multicast on, and the peers behind it.

    ``local`` is our own address on the path to each peer. If the sockets are ``bound`` to an interface, it is
    that one. Otherwise it is the one with the most peers behind it, and loopback only if there is no other.
    """
    if bound or not local:
        return bound, tuple(sorted(local))
    behind: dict[str, list[int]] = {}
    for peer, address in sorted(local.items()):
        behind.setdefault(address, []).append(peer)
    best = max(behind, key=lambda address: (not is_loopback(address), len(behind[address])))
    return best, tuple(behind[best])
