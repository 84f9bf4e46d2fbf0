"""This host's addresses and paths, as the kernel tells them. Sends nothing."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from tailcut.errors import ConfigError

IP_MTU = 14  # linux/in.h; not in the socket module
SIOCGIFADDR = 0x8915  # linux/sockios.h
LOOPBACK = "127.0.0.1"
IP_UDP_BYTES = 28

Source = tuple[str, int]
"""IPv4 address and UDP port that a datagram came from."""


def host_identity() -> str:
    """Processes with the same string share a host and a network namespace, so loopback connects them."""
    return f"{_boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"


def interfaces() -> dict[str, str]:
    """The IPv4 address of every interface that has one, by name, in the kernel's order."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    return found


def address_of(interface: str) -> str:
    """The IPv4 address of the interface with this name."""
    found = interfaces()
    if interface not in found:
        raise ConfigError(
            f"socket_ifname={interface!r} is not an interface with an IPv4 address; "
            f"this host has {', '.join(found) or 'none'}"
        )
    return found[interface]


def interface_name(address: str) -> str:
    """The name of the interface with this address. A secondary address stands for itself."""
    return next((name for name, own in interfaces().items() if own == address), address)


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def path_mtu_bytes(address: str) -> int | None:
    """The MTU of the path to an address, from the routing table; None if there is no route."""
    with _towards(address) as probe:
        return probe.getsockopt(socket.IPPROTO_IP, IP_MTU) if probe else None


def multicast_mtu_bytes(group: str, interface: str) -> int | None:
    """The MTU of the interface with this address for multicast; None if it cannot multicast."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
            probe.connect((group, 9))
        except OSError:
            return None
        return probe.getsockopt(socket.IPPROTO_IP, IP_MTU)


def local_address_towards(address: str) -> str | None:
    """Our own address on the path to another address; None if there is no route."""
    with _towards(address) as probe:
        return str(probe.getsockname()[0]) if probe else None


@contextmanager
def _towards(address: str) -> Iterator[socket.socket | None]:
    """A UDP socket connected to an address, or None. Connecting sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            yield None
        else:
            yield probe


@lru_cache(maxsize=1)
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
