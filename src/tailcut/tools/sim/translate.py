"""A scenario of the testbed as a simulated network: the same TOML, with the same meaning.

Nothing is scaled: bursts have the same bytes and gaps, faults come at the same times and last as long. What a
simulated network does not have is refused.
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
    NeighbourFlows,
    Partition,
    SimulatedNetwork,
    Wan,
)
from tailcut.tools.testbed import HostScenario
from tailcut.tools.testbed.faults import Action, schedule
from tailcut.tools.testbed.scenario import ETHERNET_BYTES, HEADERS_BYTES, Kill

IP_BYTES = 20
UDP_BYTES = 8
SWITCH_DELAY_S = 10e-6

_TESTBED_ONLY = {
    "port": ("burst_bytes",),
    "switch": ("lengths", "trimmable_ports", "trimmable_dscp", "trimmed_dscp"),
}
"""By table. A simulated link has no token bucket; a simulated packet has no lengths, ports or DSCP."""


@dataclass(frozen=True)
class Conditions:
    """What all sides meet."""

    network: SimulatedNetwork
    """Of UDP packets."""
    freezes: tuple[Freeze, ...]
    hangs: tuple[Hang, ...]
    mtu_bytes: int

    def tcp(self) -> SimulatedNetwork:
        """The same network for packets that bring their own transport header, and that no switch trims."""
        return replace(self.network, frame_bytes=ETHERNET_BYTES + IP_BYTES, trim=0.0, trim_above_bytes=0)


def conditions_of(scenario: HostScenario, *, ranks: int, until_s: float) -> Conditions:
    """``until_s``: the end of faults that repeat, of which there is none otherwise."""
    _refuse_what_is_not_simulated(scenario)
    for fault in scenario.faults:
        if fault.host >= ranks:
            raise ConfigError(f"{scenario.name} troubles rank {fault.host}; give --ranks above that")
    port, switch = scenario.port, scenario.switch
    freezes, hangs, partitions = _faults(scenario, until_s)
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
        partitions=partitions,
        bursts=_bursts(scenario),
        neighbours=_neighbours(scenario),
        wan=_wan(scenario, ranks),
    )
    return Conditions(network, freezes, hangs, port.mtu_bytes)


def _refuse_what_is_not_simulated(scenario: HostScenario) -> None:
    for table, names in _TESTBED_ONLY.items():
        part = getattr(scenario, table)
        for field in fields(part):
            if field.name in names and getattr(part, field.name) != field.default:
                raise ConfigError(
                    f"{scenario.name}: [{table}] {field.name} has no meaning in a simulation: "
                    "take it out, or use tailcut testbed"
                )


def _bytes_per_s(mbit_s: float) -> float:
    return 1e6 / 8 * mbit_s


def _bursts(scenario: HostScenario) -> Bursts | None:
    bursts, mtu_bytes = scenario.background, scenario.port.mtu_bytes
    if bursts is None:
        return None
    return Bursts(
        volume_bytes=bursts.frames_bytes(mtu_bytes),
        gap_min_s=bursts.gap_min_s,
        gap_mean_s=bursts.gap_mean_s,
        packet_bytes=mtu_bytes + ETHERNET_BYTES,
    )


def _neighbours(scenario: HostScenario) -> NeighbourFlows | None:
    neighbours = scenario.neighbours
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


def _faults(
    scenario: HostScenario, until_s: float
) -> tuple[tuple[Freeze, ...], tuple[Hang, ...], tuple[Partition, ...]]:
    """As the testbed plays them: all that come once, and of those that repeat the ones until then."""
    ends_s = [fault.at_s + (0 if isinstance(fault, Kill) else fault.for_s) for fault in scenario.faults]
    last_s = until_s + max(ends_s, default=0)
    freezes, hangs, partitions = [], [], []
    begun_s: dict[tuple[int, Action], float] = {}
    for event in takewhile(lambda event: event.at_s <= last_s, schedule(scenario)):
        host, at_s = event.host, event.at_s
        match event.action:
            case "kill":
                freezes.append(Freeze(host, at_s, None))
            case "release":
                freezes.append(Freeze(host, begun_s.pop((host, "freeze")), at_s))
            case "resume":
                hangs.append(Hang(host, begun_s.pop((host, "hang")), at_s))
            case "link up":
                partitions.append(Partition(begun_s.pop((host, "link down")), at_s, (host,)))
            case "freeze" | "hang" | "link down":
                begun_s[host, event.action] = at_s
    return tuple(freezes), tuple(hangs), tuple(partitions)
