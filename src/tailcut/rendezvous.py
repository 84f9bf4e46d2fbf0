"""How ranks find each other: every rank publishes one card in the store and reads all the others.

Owns addresses, path MTUs and the group's tag. Knows nothing of ops.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from tailcut.config import Config
from tailcut.errors import ConfigError, PeerError
from tailcut.store import Store

IP_MTU = 14  # linux/in.h; not in the socket module
SIOCGIFADDR = 0x8915  # linux/sockios.h
IP_UDP_BYTES = 28


@dataclass(frozen=True)
class Card:
    """What a rank tells the others before the first packet."""

    host: str
    """Same host and network namespace, same string: then loopback reaches it."""
    addresses: list[str]
    loopback: bool
    ports: list[int]
    """One for each lane."""
    window_bytes: int
    """Each sender's share of a lane's socket buffer."""
    pool_bytes: int
    agreed: dict[str, int]
    nonce: str


@dataclass(frozen=True)
class Route:
    """How to reach a peer."""

    address: str
    mtu_bytes: int


@dataclass(frozen=True)
class Roster:
    cards: list[Card]
    routes: list[Route]
    tag: int
    """Random, 64 bits, known to the members only: keeps packets of others and of earlier lives out."""


def meet(store: Store, name: str, rank: int, world_size: int, card: Card, config: Config) -> Roster:
    """Publish our card, read everybody's, agree. Raises PeerError naming the ranks that did not come."""
    if _try_check(store, _key(name, rank)):
        raise ConfigError(
            f"the store already holds rank {rank} of group {name!r}: "
            "each group needs a fresh store or its own name"
        )
    store.set(_key(name, rank), json.dumps(asdict(card)).encode())
    cards = _read_all(store, name, rank, world_size, config.rendezvous_s)
    cards[rank] = card
    differing = {
        f"{field}: " + ", ".join(f"rank {r} has {c.agreed.get(field)}" for r, c in enumerate(cards))
        for field in card.agreed
        if any(c.agreed.get(field) != card.agreed[field] for c in cards)
    }
    if differing:
        raise ConfigError(f"the ranks of group {name!r} must agree on " + "; ".join(sorted(differing)))
    digest = hashlib.blake2b("".join(c.nonce for c in cards).encode(), digest_size=8).digest()
    routes = [_route_to(r, c, card) for r, c in enumerate(cards)]
    return Roster(cards, routes, int.from_bytes(digest, "little"))


def make_card(config: Config, ports: list[int], window_bytes: int) -> Card:
    return Card(
        host=_host_identity(),
        addresses=[config.address] if config.address else list(_interface_addresses()),
        loopback=config.address in ("", "127.0.0.1"),
        ports=ports,
        window_bytes=window_bytes,
        pool_bytes=config.pool_bytes,
        agreed=config.agreed,
        nonce=os.urandom(16).hex(),
    )


def packet_granules(
    route: Route, window_bytes: int, config: Config, header_bytes: int, granule_bytes: int
) -> int:
    """Granules per packet: what the path carries in one datagram, and the peer's window holds."""
    largest = min(route.mtu_bytes - IP_UDP_BYTES, 65_507) - header_bytes
    if config.packet_bytes > largest:
        raise ConfigError(
            f"packet_bytes={config.packet_bytes} exceeds the {largest} bytes that the path to "
            f"{route.address} carries (MTU {route.mtu_bytes}); lower it or raise the MTU"
        )
    if config.packet_bytes:
        return config.packet_bytes // granule_bytes
    comfortable = min(largest, 61_440, max(granule_bytes, window_bytes - 2048))
    return max(1, comfortable // granule_bytes)


def _key(name: str, rank: int) -> str:
    return f"tailcut/{name}/{rank}"


def _read_all(store: Store, name: str, rank: int, world_size: int, timeout_s: float) -> list[Card]:
    missing = [r for r in range(world_size) if r != rank]
    cards: dict[int, Card] = {}
    give_up = time.monotonic() + timeout_s
    pause_s = 0.001
    while missing:
        for peer in list(missing):
            text = _try_get(store, _key(name, peer))
            if text is not None:
                cards[peer] = _parse(text, peer)
                missing.remove(peer)
        if missing and time.monotonic() >= give_up:
            raise PeerError(
                f"group {name!r}: rank {rank} waited {timeout_s:g} s for {world_size - 1} peers and "
                f"ranks {missing} did not come; are they running, with the same store, name and world_size?"
            )
        if missing:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    return [cards.get(r) for r in range(world_size)]  # type: ignore[misc]


def _try_check(store: Store, key: str) -> bool | None:
    """Whether the key is there; None if the store cannot tell without blocking."""
    check = getattr(store, "check", None)
    return None if check is None else bool(check([key]))


def _try_get(store: Store, key: str) -> bytes | None:
    if _try_check(store, key) is False:
        return None
    with suppress(LookupError, TimeoutError):
        return store.get(key)
    return None


def _parse(text: bytes, peer: int) -> Card:
    try:
        return Card(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise PeerError(
            f"rank {peer} published something that this version does not understand: {error}"
        ) from None


def _route_to(rank: int, card: Card, own: Card) -> Route:
    same_host = card.host == own.host
    if same_host and card.loopback and own.loopback:
        return _probe("127.0.0.1") or Route("127.0.0.1", 65_536)
    for address in card.addresses:
        route = _probe(address)
        if route:
            return route
    raise PeerError(
        f"no route to rank {rank}, which published {card.addresses or 'no address'}; "
        "set Config(address=...) on both ranks to addresses of a common network"
    )


def _probe(address: str) -> Route | None:
    """The path to an address as the routing table has it. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))
        return Route(address, probe.getsockopt(socket.IPPROTO_IP, IP_MTU))
    return None


@lru_cache(maxsize=1)
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _host_identity() -> str:
    return f"{_boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"


def _interface_addresses() -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", interface.encode()[:15])
                address = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
                if not address.startswith("127."):
                    yield address
