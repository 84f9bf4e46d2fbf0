"""The sockets of a rank's lanes: where they are bound, and how much a packet between two of them carries."""

from __future__ import annotations

import ipaddress

from tailcut import _native
from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.meeting.addresses import IP_UDP_BYTES, address_of

_GRANULE_BYTES = 4 * _native.GRANULE
_MOST_DATAGRAM_BYTES = 65_507
_MOST_PAYLOAD_BYTES = 61_440


def bind_address(config: Config) -> str:
    """The address to bind and to publish. If it is empty, sockets are bound to any address."""
    return config.address or (address_of(config.socket_ifname) if config.socket_ifname else "")


def open_lane(address: str, config: Config) -> _native.UdpLane:
    """A lane whose socket is bound to this address, or to any if it is empty."""
    try:
        bind_ipv4 = int(ipaddress.IPv4Address(address or "0.0.0.0"))
        return _native.UdpLane(bind_ipv4, config.receive_buffer_bytes, config.offload)
    except RuntimeError as error:  # std::system_error
        raise ConfigError(f"cannot open a UDP socket on {address or 'any address'}: {error}") from error


def open_lanes(config: Config) -> list[_native.UdpLane]:
    """All lanes of a rank."""
    bound = bind_address(config)
    return [open_lane(bound, config) for _ in range(config.lanes)]


def payload_bytes(address: str, mtu_bytes: int, window_bytes: int, config: Config) -> int:
    """The most that one packet carries: it must fit a datagram on the path and the window of the peer."""
    largest = min(mtu_bytes - IP_UDP_BYTES, _MOST_DATAGRAM_BYTES) - _native.HEADER_BYTES
    if config.packet_bytes > largest:
        raise ConfigError(
            f"packet_bytes={config.packet_bytes} exceeds the {largest} bytes that the path to "
            f"{address} carries (MTU {mtu_bytes}); lower it or raise the MTU"
        )
    return config.packet_bytes or min(largest, _MOST_PAYLOAD_BYTES, max(_GRANULE_BYTES, window_bytes - 2048))
