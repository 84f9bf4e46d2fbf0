"""Turns a scenario of the testbed into a simulated network, with the same meaning.

Nothing is scaled: bursts have the same bytes and gaps, faults come at the same times and last as long. Fields
that a simulated network cannot honour are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import takewhile

from tailcut.errors import ConfigError
from tailcut.simulation import Freeze, Hang
from tailcut.simulation.network import (
    TCP_HEADER_BYTES,
    Bursts,
    BurstyLoss,
    Machine,
    NeighbourFlows,
    Partition,
    RateChange,
    SimulatedNetwork,
    Wan,
)
from tailcut.tools.testbed import HostScenario
from tailcut.tools.testbed.faults import freeze_times_s
from tailcut.tools.testbed.scenario import BURST_SPEED, ETHERNET_BYTES, HEADERS_BYTES, Neighbours
from tailcut.tools.testbed.topology import switch_ports

IP_BYTES = 20
UDP_BYTES = 8
SWITCH_DELAY_S = 10e-6

PACKET_COST_S = 30e-6
"""What a packet costs one core of a testbed's machine, from the sender's program to the receiver's, codec
included. Fitted to P50 of the scenario clean on 2 cores, with 4 planes, and then frozen for all scenarios
(docs/simulation.md)."""

_TESTBED_ONLY = {
    "port": ("burst_bytes",),
    "switch": ("lengths", "trimmable_ports", "trimmable_dscp", "trimmed_dscp"),
}
"""Fields that are refused, by table. Only the links of a testbed are token buckets; a simulated packet has no
lengths, ports or DSCP."""


@dataclass(frozen=True)
class Conditions:
    """The conditions that all sides meet."""

    network: SimulatedNetwork
    """The network as UDP packets meet it."""
    freezes: tuple[Freeze, ...]
    hangs: tuple[Hang, ...]
    mtu_bytes: int

    def tcp(self) -> SimulatedNetwork:
        """The same network for packets that have their own transport header and that no switch trims."""
        return replace(self.network, frame_bytes=ETHERNET_BYTES + IP_BYTES, trim=0.0, trim_above_bytes=0)


def conditions_of(scenario: HostScenario, *, ranks: int, until_s: float, cores: int = 0) -> Conditions:
    """What the ranks meet. Freezes, which may repeat for ever, begin by ``until_s``. With ``cores`` the
    testbed is simulated, on a machine that has so many."""
    _refuse_what_is_not_simulated(scenario, cores)
    for trouble in (*scenario.faults, *scenario.slow_ports):
        if trouble.host >= ranks:
            raise ConfigError(f"{scenario.name} troubles rank {trouble.host}; give --ranks above that")
    port, switch = scenario.port, scenario.switch
    trim_above = switch.trim_above_bytes
    network = SimulatedNetwork(
        seed=scenario.seed,
        loss=switch.loss_frac,
        bursty_loss=_bursty_loss(scenario),
        trim=switch.trim_frac,
        trim_to_bytes=switch.trim_frame_bytes - HEADERS_BYTES,
        trim_above_bytes=0 if trim_above is None else max(1, trim_above),
        delay_s=SWITCH_DELAY_S,
        bytes_per_s=_bytes_per_s(port.rate_mbit_s),
        uplink_bytes_per_s=_bytes_per_s(port.uplink),
        queue_bytes=port.queue_bytes,
        frame_bytes=HEADERS_BYTES,
        partitions=_partitions(scenario),
        rate_changes=tuple(RateChange(0.0, p.host, p.rate_frac, p.rate_frac) for p in scenario.slow_ports),
        bursts=_bursts(scenario, cores),
        neighbours=_neighbours(scenario),
        wan=_wan(scenario, ranks),
        machine=_machine(scenario, cores),
    )
    return Conditions(network, _freezes(scenario, until_s), _hangs(scenario), port.mtu_bytes)


def _refuse_what_is_not_simulated(scenario: HostScenario, cores: int) -> None:
    for table, names in _TESTBED_ONLY.items():
        part = getattr(scenario, table)
        for field in fields(part):
            if field.name == "burst_bytes" and cores:
                continue
            if field.name in names and getattr(part, field.name) != field.default:
                raise ConfigError(
                    f"{scenario.name}: [{table}] {field.name} has no meaning in a simulation: "
                    "take it out, or use tailcut testbed"
                )


def _bytes_per_s(mbit_s: float) -> float:
    return 1e6 / 8 * mbit_s


def _bursts(scenario: HostScenario, cores: int) -> Bursts | None:
    bursts, mtu_bytes = scenario.background, scenario.port.mtu_bytes
    if bursts is None:
        return None
    return Bursts(
        volume_bytes=bursts.frames_bytes(mtu_bytes),
        gap_min_s=bursts.gap_min_s,
        gap_mean_s=bursts.gap_mean_s,
        packet_bytes=mtu_bytes + ETHERNET_BYTES,
        bytes_per_s=BURST_SPEED * _bytes_per_s(scenario.port.rate_mbit_s) if cores else 0.0,
    )


def _neighbours(scenario: HostScenario) -> NeighbourFlows | None:
    neighbours, jobs = scenario.neighbours, scenario.jobs
    if jobs is not None:
        # One flow after the other, as often as ops of all jobs at a port together begin.
        jobs_at_port = 2 * jobs.count / scenario.hosts
        neighbours = Neighbours(flow_bytes=jobs.op_bytes, gap_mean_s=jobs.gap_mean_s / jobs_at_port)
    if neighbours is None:
        return None
    return NeighbourFlows(
        flow_bytes=neighbours.flow_bytes,
        gap_mean_s=neighbours.gap_mean_s,
        segment_bytes=scenario.port.mtu_bytes - IP_BYTES - TCP_HEADER_BYTES,
    )


def _bursty_loss(scenario: HostScenario) -> BurstyLoss | None:
    bursty = scenario.switch.bursty_loss
    if bursty is None:
        return None
    return BurstyLoss(enter=bursty.enter_frac, leave=bursty.leave_frac, loss=bursty.loss_frac)


def _wan(scenario: HostScenario, ranks: int) -> Wan | None:
    wan = scenario.wan
    if wan is None:
        return None
    return Wan(
        second_site=(ranks + 1) // 2,
        bytes_per_s=_bytes_per_s(wan.rate_mbit_s),
        delay_s=wan.delay_s,
        loss=wan.loss_frac,
        queue_bytes=wan.queue_bytes,
    )


def _machine(scenario: HostScenario, cores: int) -> Machine | None:
    if not cores:
        return None
    return Machine(
        cores=cores, packet_cost_s=PACKET_COST_S, bucket_bytes=switch_ports(scenario)[0].burst_bytes
    )


def _freezes(scenario: HostScenario, until_s: float) -> tuple[Freeze, ...]:
    """The kills, and the freezes at the times of the testbed, as far as they begin by ``until_s``."""
    freezes = [Freeze(kill.host, kill.at_s, None) for kill in scenario.kills]
    for freeze, times_s in zip(scenario.freezes, freeze_times_s(scenario), strict=True):
        in_time = takewhile(lambda times: times[0] <= until_s, times_s)
        freezes += [Freeze(freeze.host, *times) for times in in_time]
    return tuple(freezes)


def _hangs(scenario: HostScenario) -> tuple[Hang, ...]:
    return tuple(Hang(hang.host, hang.at_s, hang.at_s + hang.for_s) for hang in scenario.hangs)


def _partitions(scenario: HostScenario) -> tuple[Partition, ...]:
    return tuple(Partition(dark.at_s, dark.at_s + dark.for_s, (dark.host,)) for dark in scenario.link_downs)
