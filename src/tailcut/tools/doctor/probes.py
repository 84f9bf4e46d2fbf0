"""Asks the kernel of this host about interfaces, buffers, offloads, multicast and names. Judges nothing.

Sends datagrams to this host only.
"""

from __future__ import annotations

import fcntl
import os
import socket
import statistics
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tailcut.config import Config
from tailcut.meeting.addresses import LOOPBACK, interfaces, is_loopback, local_address_towards
from tailcut.meeting.sockets import open_lane

SIOCGIFMTU = 0x8921  # linux/sockios.h
UDP_SEGMENT, UDP_GRO = 103, 104  # linux/udp.h; not in the socket module

_SCOPED_GROUP = "239.255.84.67"
"""An administratively scoped group (RFC 2365), which no router forwards."""
_FAR_AWAY = "198.51.100.1"
"""An address for documentation (RFC 5737). The path to it is the default route."""
_WAIT_S = 0.5
_LOOPBACK_PINGS = 50


@dataclass(frozen=True)
class Interface:
    name: str
    address: str
    mtu_bytes: int


@dataclass(frozen=True)
class HostFacts:
    """What is known about this host, without any judgement."""

    hostname: str
    hostname_address: str | None
    """The address to which the name of the host resolves."""
    gloo_ifname: str
    interfaces: tuple[Interface, ...]
    chosen_by: str
    """The variable that names the interface; else ``route``, or ``order`` if there is no route."""
    chosen: Interface | None
    """The interface that the configuration names. Otherwise it is that of the path to the master, that of the
    default route, or the first."""
    buffer_granted_bytes: int
    """The receive buffer of a lane as the kernel reports it: twice what was asked for, if all was granted."""
    buffer_limit_bytes: int | None
    """The value of net.core.rmem_max; None if the kernel does not show it."""
    segments: bool
    coalesces: bool
    multicast: bool
    packet_socket: bool
    """Whether a packet socket may be opened, for packets that are trimmed but state their old length."""
    loopback_rtt_s: float | None
    """The median; None if a datagram did not come back."""


def ask(config: Config) -> HostFacts:
    """Ask for everything. It takes milliseconds, and about two seconds at most where nothing answers."""
    found = tuple(Interface(name, address, _mtu_bytes(name)) for name, address in interfaces().items())
    route_address = local_address_towards(os.environ.get("MASTER_ADDR") or _FAR_AWAY)
    chosen, chosen_by = choose(found, config, route_address)
    hostname = socket.gethostname()
    return HostFacts(
        hostname=hostname,
        hostname_address=_resolve(hostname),
        gloo_ifname=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        interfaces=found,
        chosen_by=chosen_by,
        chosen=chosen,
        buffer_granted_bytes=open_lane("", config).receive_buffer_bytes,
        buffer_limit_bytes=_buffer_limit_bytes(),
        segments=_accepts(UDP_SEGMENT, 1200),
        coalesces=_accepts(UDP_GRO, 1),
        packet_socket=_opens_packet_socket(),
        multicast=_multicast_returns(chosen.address if chosen else LOOPBACK),
        loopback_rtt_s=_loopback_rtt_s(),
    )


def choose(
    found: tuple[Interface, ...], config: Config, route_address: str | None
) -> tuple[Interface | None, str]:
    """The interface that a group would use, and by what it was chosen.

    The address counts before the name. If neither is given, it is the interface of the route, or the first.
    """
    if config.address:
        return next((i for i in found if i.address == config.address), None), "TAILCUT_ADDRESS"
    if config.socket_ifname:
        variable = "TAILCUT_SOCKET_IFNAME" if "TAILCUT_SOCKET_IFNAME" in os.environ else "GLOO_SOCKET_IFNAME"
        return next((i for i in found if i.name == config.socket_ifname), None), variable
    on_route = next((i for i in found if i.address == route_address), None)
    if on_route is not None:
        return on_route, "route"
    return next((i for i in found if not is_loopback(i.address)), None), "order"


def _mtu_bytes(interface: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16s16x", interface.encode()[:15])
        return int(struct.unpack_from("i", fcntl.ioctl(probe.fileno(), SIOCGIFMTU, request), 16)[0])


def _resolve(hostname: str) -> str | None:
    try:
        return socket.gethostbyname(hostname)
    except OSError:
        return None


def _buffer_limit_bytes() -> int | None:
    with suppress(OSError):  # the kernel does not show it in a network namespace
        return int(Path("/proc/sys/net/core/rmem_max").read_text())
    return None


def _accepts(option: int, value: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_UDP, option, value)
        except OSError:
            return False
        return True


def _opens_packet_socket() -> bool:
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0).close()
    except OSError:
        return False
    return True


def _multicast_returns(address: str) -> bool:
    """Whether a second socket hears what is sent to a group on that interface. TTL 0 keeps it here."""
    ours = socket.inet_aton(address)
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as member,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        member.settimeout(_WAIT_S)
        try:
            member.bind((_SCOPED_GROUP, 0))
            member.setsockopt(
                socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_SCOPED_GROUP) + ours
            )
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, ours)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            word = os.urandom(16)
            sender.sendto(word, member.getsockname())
            return member.recv(64) == word
        except OSError:  # there is no such group or no route, or the time is up
            return False


def _loopback_rtt_s() -> float | None:
    """The round trip between two threads, which includes the cost of waking up on this host."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as near,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as far,
    ):
        for end in (near, far):
            end.bind((LOOPBACK, 0))
            end.settimeout(_WAIT_S)
        echo = threading.Thread(target=_echo, args=(far,))
        echo.start()
        try:
            return statistics.median(_ping(near, far.getsockname()) for _ in range(_LOOPBACK_PINGS))
        except OSError:
            return None
        finally:
            echo.join()


def _ping(near: socket.socket, far: tuple[str, int]) -> float:
    start_s = time.perf_counter()
    near.sendto(bytes(64), far)
    near.recv(64)
    return time.perf_counter() - start_s


def _echo(far: socket.socket) -> None:
    with suppress(OSError):
        for _ in range(_LOOPBACK_PINGS):
            datagram, source = far.recvfrom(64)
            far.sendto(datagram, source)
