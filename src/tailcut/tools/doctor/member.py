"""One rank among its peers: it meets them, pings them and averages with them. Each part has its limit.

What a peer does wrong becomes a failed check. It ends the examination with what was found until then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from tailcut import _native
from tailcut.config import Config
from tailcut.errors import ConfigError, PeerError, TailcutError
from tailcut.grid import grid_of
from tailcut.group import Group
from tailcut.meeting.addresses import host_identity
from tailcut.meeting.rendezvous import meet
from tailcut.meeting.roster import Roster
from tailcut.meeting.sockets import bind_address, open_lanes
from tailcut.mirror import Link
from tailcut.store import Store
from tailcut.tools.doctor import host, probes
from tailcut.tools.doctor.check import Check, Setting
from tailcut.tools.doctor.echo import Echo, Target, limit_s
from tailcut.tools.doctor.exchange import Exchange
from tailcut.tools.doctor.findings import Findings, Op

OPS = 10
OP_LIMIT_S = 5.0
"""The deadline of the measured ops. It is long, so that the network is measured and not the deadline."""
OPS_LIMIT_S = 10.0
"""After this long no further op begins."""
SKEW_S = 5.0
"""How much longer than this rank a peer may take for a part."""

_SWALLOWED = "answers small packets but none of"  # the words of the rendezvous in its PeerError
_SAFE_PACKET_BYTES = (8704, 1280, 1024, 256)
"""Payloads that fit MTU 9000, MTU 1500 less a tunnel, MTU 1280, and any other."""


@dataclass(frozen=True)
class Options:
    """What is examined. It is the same on all ranks."""

    config: Config = field(default_factory=Config)
    bucket_bytes: int = 25 << 20
    """The size of the averaged bucket. The default is that of DDP."""

    def __post_init__(self) -> None:
        if not 4 <= self.bucket_bytes <= 1 << 30 or self.bucket_bytes % 4:
            raise ConfigError(
                f"bucket={self.bucket_bytes} must be a multiple of 4 (float32) between 4 bytes and 1 GiB"
            )


def examine_host(rank: int, world_size: int, config: Config) -> Findings:
    """Ask the kernel of this host, and no peer."""
    facts = probes.ask(config)
    return Findings(rank, facts.hostname, host_identity(), checks=host.judge(facts, config, world_size))


def examine(rank: int, world_size: int, store: Store, options: Options) -> Findings:
    """Examine this host, then the peers."""
    findings = examine_host(rank, world_size, options.config)
    if world_size == 1:
        return findings
    stage = "reachability"
    try:
        roster = _meet(rank, world_size, store, options.config)
        findings.checks.append(Check(stage, "ok", _answers(roster, rank)))
        findings.checks.append(_multicast(roster))
        stage = "ping"
        _ping(findings, roster, store, options.config)
        stage = "allreduce"
        _average(findings, world_size, store, options)
    except TailcutError as error:
        findings.checks.append(_failed(stage, str(error)))
    return findings


def _meet(rank: int, world_size: int, store: Store, config: Config) -> Roster:
    grid = grid_of(world_size, config.rows, config.multicast)
    return meet(store, "doctor", rank, grid, open_lanes(config), config)


def _ping(findings: Findings, roster: Roster, store: Store, config: Config) -> None:
    rank, world_size = findings.rank, len(roster.cards)
    peers = [peer for peer in range(world_size) if peer != rank]
    exchange = Exchange(store, f"{roster.tag:016x}", rank)
    with Echo(bind_address(config), config.receive_buffer_bytes, rank, world_size, roster.tag) as echo:
        exchange.publish("port", echo.port)
        ports = exchange.collect("port", peers, SKEW_S)
        targets = {peer: _target(roster, peer, port) for peer, port in ports.items()}
        findings.pings = echo.ping(targets)
        exchange.publish("pinged", True)
        echo.answer_until(lambda: not exchange.missing("pinged", targets), limit_s(world_size) + SKEW_S)
        findings.heard = echo.heard
        if gone := exchange.missing("pinged", peers):
            raise PeerError(f"ranks {gone} met rank {rank} and then ended or froze: see what they say")


def _answers(roster: Roster, rank: int) -> str:
    sizes = sorted({_packet_bytes(roster, peer) for peer in range(len(roster.cards)) if peer != rank})
    return f"every peer answers to packets of {' and '.join(map(str, sizes))} bytes"


def _multicast(roster: Roster) -> Check:
    """Whether one datagram reaches all peers. Nothing fails if it does not."""
    multicast = roster.multicast
    if multicast.unheard:
        remedy = (
            f"ranks {list(multicast.unheard)} are served by unicast: let firewalls pass 239.192.0.0/14 and "
            "switches snoop IGMP with a querier, or TAILCUT_MULTICAST=off opens groups faster"
        )
        return Check("multicast peers", "warn", multicast.description, remedy)
    return Check("multicast peers", "ok", multicast.description)


def _packet_bytes(roster: Roster, peer: int) -> int:
    return _native.HEADER_BYTES + roster.routes[peer].payload_bytes


def _target(roster: Roster, peer: int, port: int) -> Target:
    return Target(roster.routes[peer].address, port, _packet_bytes(roster, peer))


def _average(findings: Findings, world_size: int, store: Store, options: Options) -> None:
    """Do the same ops on all ranks. A rank that has run out of time says goodbye, and nobody waits for it."""
    config = replace(options.config, deadline_s=OP_LIMIT_S)
    bucket = np.zeros(options.bucket_bytes // 4, np.float32)
    with Group(findings.rank, world_size, store, config, name="doctor/allreduce") as group:
        group.allreduce(bucket).wait()  # the first op touches fresh memory
        give_up = time.monotonic() + OPS_LIMIT_S
        while len(findings.ops) < OPS and (not findings.ops or time.monotonic() < give_up):
            report = group.allreduce(bucket).wait()
            complete = report.status == "complete"
            sources_s = [_took_s(link) for link in report.links]
            findings.ops.append(Op(report.elapsed_s, complete, report.lost_frac, sources_s))
            if silent := [peer for peer, link in enumerate(report.links) if link.gather.lost_frac == 1]:
                raise PeerError(f"ranks {silent} sent nothing in op {report.seq}: they ended or froze")


def _took_s(link: Link) -> float | None:
    """How long the contribution of a rank took to come here."""
    if link.entered_s is None or link.scatter.last_s is None:
        return None
    return max(0.0, link.scatter.last_s - link.entered_s)


def _failed(stage: str, text: str) -> Check:
    if _SWALLOWED not in text:
        return Check(stage, "fail", text, "mend this first: the rest was not measured")
    failed_bytes = int(text.split(_SWALLOWED)[1].split()[0])
    smaller = [p for p in _SAFE_PACKET_BYTES if p < 0.9 * failed_bytes]  # another kind of network
    why = f"packets of {failed_bytes} bytes are swallowed: some link carries less than the interfaces say"
    setting = Setting("TAILCUT_PACKET_BYTES", str(smaller[0] if smaller else 256), why)
    return Check(stage, "fail", text, f"{setting.command}, or mend the MTU of the path", (setting,))
