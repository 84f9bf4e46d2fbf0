"""Judges one host. Each check depends only on what the kernel said."""

from __future__ import annotations

import math

from tailcut import _native
from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.grid import grid_of
from tailcut.meeting.addresses import is_loopback
from tailcut.meeting.sockets import payload_bytes
from tailcut.tools.doctor.check import Check, Setting
from tailcut.tools.doctor.probes import HostFacts, Interface

LARGE_DATAGRAM_BYTES = 61_440 + _native.HEADER_BYTES + 1536
"""What the kernel charges to a socket buffer for the largest packet."""

COMFORTABLE_DATAGRAMS = 4
"""With room for fewer large datagrams per peer, throughput falls (measured: Config.receive_buffer_bytes)."""

SLOW_LOOPBACK_S = 1e-3


def judge(facts: HostFacts, config: Config, world_size: int) -> list[Check]:
    senders = grid_of(world_size, config.rows, config.multicast).senders
    return [
        interface(facts, config),
        packets(facts, config, senders),
        receive_buffer(facts, config, senders),
        offload(facts, config),
        multicast(facts),
        trimmed(facts, config),
        hostname(facts),
        loopback(facts),
    ]


def outward(facts: HostFacts) -> list[Interface]:
    """The interfaces by which other hosts may be reached."""
    return [i for i in facts.interfaces if not is_loopback(i.address)]


def interface(facts: HostFacts, config: Config) -> Check:
    chosen = facts.chosen
    others = ", ".join(_describe(i) for i in facts.interfaces if i != chosen)
    named = config.address or config.socket_ifname
    if chosen is None and named:
        return Check(
            "interface",
            "fail",
            f"{facts.chosen_by}={named} is not on this host, which has {others or 'no IPv4 address'}",
            f"set {facts.chosen_by} to one of them",
        )
    if chosen is None or not outward(facts):
        return Check(
            "interface",
            "warn",
            f"no network but {others or _describe(chosen)}",
            "enough for ranks on this host; to be reached from others it needs an IPv4 address",
        )
    reason = "as there is no route" if facts.chosen_by == "order" else f"by {facts.chosen_by}"
    found = f"{_describe(chosen)}, {reason}" + (f"; also {others}" if others else "")
    return Check("interface", "ok", found, settings=() if named else _name_the_network(facts, chosen))


def _name_the_network(facts: HostFacts, chosen: Interface) -> tuple[Setting, ...]:
    if len(outward(facts)) < 2:
        return ()
    why = "several networks: opening a group tries them all and takes the first that answers"
    return (Setting("TAILCUT_SOCKET_IFNAME", chosen.name, why),)


def _describe(interface: Interface | None) -> str:
    return f"{interface.name} {interface.address} (MTU {interface.mtu_bytes})" if interface else "none"


def packets(facts: HostFacts, config: Config, world_size: int) -> Check:
    chosen = facts.chosen
    if chosen is None:
        return Check("packets", "warn", "size unknown: no interface is chosen", "see interface")
    window_bytes = _native.credit_window_bytes(facts.buffer_granted_bytes, world_size)
    try:
        largest = payload_bytes(chosen.address, chosen.mtu_bytes, window_bytes, config)
    except ConfigError as error:
        return Check("packets", "fail", str(error), "unset TAILCUT_PACKET_BYTES: then packets follow the MTU")
    size = _native.HEADER_BYTES + largest
    return Check(
        "packets", "ok", f"datagrams of at most {size} bytes, of which {_native.HEADER_BYTES} header"
    )


def receive_buffer(facts: HostFacts, config: Config, world_size: int) -> Check:
    granted = facts.buffer_granted_bytes
    window_bytes = _native.credit_window_bytes(granted, world_size)
    limit = "" if facts.buffer_limit_bytes is None else f", rmem_max {facts.buffer_limit_bytes}"
    senders = _senders(world_size)
    found = (
        f"asked {config.receive_buffer_bytes}, granted {granted // 2}{limit}: "
        f"{window_bytes / LARGE_DATAGRAM_BYTES:.1f} large datagrams from {senders}"
    )
    if window_bytes >= COMFORTABLE_DATAGRAMS * LARGE_DATAGRAM_BYTES:
        return Check("receive buffer", "ok", found)
    settings = _larger_buffer(facts, config, world_size)
    remedy = f"{COMFORTABLE_DATAGRAMS} or more keep throughput up: " + "; ".join(s.command for s in settings)
    return Check("receive buffer", "warn", found, remedy, settings)


def _senders(world_size: int) -> str:
    return f"each of {world_size - 1} peers" if world_size > 2 else "a peer"


def _larger_buffer(facts: HostFacts, config: Config, world_size: int) -> tuple[Setting, ...]:
    needed = needed_buffer_bytes(world_size)
    why = f"{COMFORTABLE_DATAGRAMS} large datagrams from {_senders(world_size)}"
    settings = []
    if config.receive_buffer_bytes < needed:
        settings.append(Setting("TAILCUT_RECEIVE_BUFFER_BYTES", str(needed), why))
    # If what was asked for is enough, or what will be, then the kernel has to allow it.
    if facts.buffer_limit_bytes is None or facts.buffer_limit_bytes < needed:
        settings.append(Setting("net.core.rmem_max", str(needed), why))
    return tuple(settings)


def needed_buffer_bytes(world_size: int) -> int:
    """What to ask for, in multiples of 64 KiB. The kernel grants twice that, for all windows together."""
    per_granted_byte = _native.credit_window_bytes(1 << 30, world_size) / (1 << 30)
    granted = COMFORTABLE_DATAGRAMS * LARGE_DATAGRAM_BYTES / per_granted_byte
    return min(1 << 30, math.ceil(granted / 2 / 65_536) * 65_536)


def offload(facts: HostFacts, config: Config) -> Check:
    missing = [
        name for name, there in (("UDP_SEGMENT", facts.segments), ("UDP_GRO", facts.coalesces)) if not there
    ]
    if missing:
        return Check(
            "offload",
            "warn",
            f"the kernel refuses {' and '.join(missing)}: every packet costs a system call's work",
            "Linux 5.0 or newer has both",
        )
    if not config.offload:
        return Check("offload", "warn", "switched off by TAILCUT_OFFLOAD", "unset TAILCUT_OFFLOAD")
    return Check("offload", "ok", "UDP_SEGMENT (GSO) and UDP_GRO")


def trimmed(facts: HostFacts, config: Config) -> Check:
    if not config.receive_uncorrected:
        privilege = "" if facts.packet_socket else " and CAP_NET_RAW, which is not granted"
        others = f"others need TAILCUT_RECEIVE_UNCORRECTED=1{privilege}"
        return Check("trimmed packets", "ok", f"received if the switch corrects their lengths; {others}")
    if facts.packet_socket:
        found = "received; those whose lengths a switch did not correct pass by the firewall"
        return Check("trimmed packets", "ok", found)
    return Check(
        "trimmed packets",
        "fail",
        "TAILCUT_RECEIVE_UNCORRECTED=1 needs CAP_NET_RAW, which is not granted: no group will open",
        "grant it, or unset TAILCUT_RECEIVE_UNCORRECTED if the switch corrects the lengths of what it trims",
    )


def multicast(facts: HostFacts) -> Check:
    where = facts.chosen.name if facts.chosen else "this host"
    if facts.multicast:
        return Check("multicast", "ok", f"a datagram to a 239/8 group comes back on {where}")
    return Check(
        "multicast",
        "warn",
        f"a datagram to a 239/8 group does not come back on {where}",
        f"everything goes by unicast; ip link set {where} multicast on, and let a firewall pass 239.0.0.0/8",
    )


def hostname(facts: HostFacts) -> Check:
    address = facts.hostname_address
    found = f"{facts.hostname} resolves to {address or 'nothing'}"
    if (address and not is_loopback(address)) or not outward(facts):
        return Check("hostname", "ok", found)
    if facts.gloo_ifname:
        return Check("hostname", "ok", f"{found}; GLOO_SOCKET_IFNAME={facts.gloo_ifname} makes up for it")
    best = facts.chosen if facts.chosen and not is_loopback(facts.chosen.address) else outward(facts)[0]
    setting = Setting("GLOO_SOCKET_IFNAME", best.name, "else Gloo binds to what the host's name resolves to")
    remedy = f"harmless to tailcut, but Gloo is not reached from other hosts: {setting.command}"
    return Check("hostname", "warn", found, remedy, (setting,))


def loopback(facts: HostFacts) -> Check:
    rtt_s = facts.loopback_rtt_s
    if rtt_s is None:
        return Check(
            "loopback", "fail", "a UDP datagram to 127.0.0.1 does not come back", "let a firewall pass lo"
        )
    found = f"round trip between two threads {1e3 * rtt_s:.3f} ms"
    if rtt_s > SLOW_LOOPBACK_S:
        return Check(
            "loopback", "warn", f"{found}: this host is busy or throttled", "see what else runs here"
        )
    return Check("loopback", "ok", found)
