"""Turns a scenario of the testbed into a simulated network, with more ranks and another rate if wanted.

With ``k`` times the rate of the scenario, everything in time happens ``k`` times sooner. Bursts of a tail are
scaled with the op, so that a lone message of the same size would have the ratio as its P99/P50. Bursts that a
scenario gives in bytes stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile

from tailcut.errors import ConfigError
from tailcut.simulation import Freeze
from tailcut.simulation.network import Bursts, BurstyLoss, Partition, SimulatedNetwork, Wan
from tailcut.tools.testbed import HostScenario
from tailcut.tools.testbed.faults import schedule

ETHERNET_AND_IP_BYTES = 14 + 20
UDP_BYTES = 8
SWITCH_DELAY_S = 10e-6
HIT_EVERY = 4
"""On the testbed a lone message meets a burst in one of 25 cases. An op meets the bursts of all ports. So
every port has them less often, by this factor times the number of ranks: then a burst begins in about one op
in a hundred. A burst lasts for ``ratio - 1`` ops, so about 3 % of the ops of tail-3 are hit, and P99 is one
of them."""
FIRST_FAULT_SHARE = 0.25
"""A fault comes at the latest after this share of the shortest possible run."""


@dataclass(frozen=True)
class Conditions:
    """The conditions that all sides meet."""

    network: SimulatedNetwork
    """The network as UDP packets meet it."""
    freezes: tuple[Freeze, ...]
    mtu_bytes: int
    bytes_per_s: float

    def tcp(self) -> SimulatedNetwork:
        """The same network for packets that have their own transport header and that no switch trims."""
        return replace(self.network, frame_bytes=ETHERNET_AND_IP_BYTES, trim=0.0, trim_above_bytes=0)


def conditions_of(
    scenario: HostScenario,
    *,
    ranks: int,
    size_bytes: int,
    ops: int,
    seed: int | None = None,
    rate_bytes_per_s: float | None = None,
    mtu_bytes: int | None = None,
) -> Conditions:
    port, switch = scenario.port, scenario.switch
    nominal = 1e6 / 8 * port.rate_mbit_s
    rate = rate_bytes_per_s or nominal
    faster = rate / nominal
    port_bytes = 2 * (ranks - 1) / ranks * size_bytes
    mtu = mtu_bytes or port.mtu_bytes
    freezes, partitions = _faults(scenario, ranks, faster, ops * port_bytes / rate)
    bursts, deeper = None, 1.0
    if tail := scenario.tail:
        larger = max(port_bytes, 1.0) / tail.message_bytes
        deeper = max(1.0, larger)
        rarer = HIT_EVERY * ranks
        bursts = Bursts(
            volume_bytes=round((tail.ratio - 1) * port_bytes),
            gap_min_s=tail.gap_min_s * rarer * larger / faster,
            gap_mean_s=tail.gap_mean_s * rarer * larger / faster,
            packet_bytes=mtu + 14,
        )
    elif blocks := scenario.bursts:
        bursts = Bursts(
            volume_bytes=blocks.frames_bytes(mtu),
            gap_min_s=blocks.gap_min_s / faster,
            gap_mean_s=blocks.gap_mean_s / faster,
            packet_bytes=mtu + 14,
        )
    network = SimulatedNetwork(
        seed=scenario.seed if seed is None else seed,
        loss=switch.loss_frac,
        bursty_loss=_bursty_loss(scenario),
        trim=switch.trim_frac,
        trim_to_bytes=switch.trim_frame_bytes - ETHERNET_AND_IP_BYTES - UDP_BYTES,
        trim_above_bytes=switch.trim_above_bytes or 0,
        delay_s=SWITCH_DELAY_S,
        bytes_per_s=rate,
        uplink_bytes_per_s=1e6 / 8 * port.uplink * faster,
        queue_bytes=round(port.queue_bytes * deeper),
        frame_bytes=ETHERNET_AND_IP_BYTES + UDP_BYTES,
        partitions=partitions,
        bursts=bursts,
        wan=_wan(scenario, ranks, faster),
    )
    return Conditions(network, freezes, mtu, rate)


def _bursty_loss(scenario: HostScenario) -> BurstyLoss | None:
    bursty = scenario.switch.bursty_loss
    if bursty is None:
        return None
    return BurstyLoss(enter=bursty.enter_frac, leave=bursty.leave_frac, loss=bursty.loss_frac)


def _wan(scenario: HostScenario, ranks: int, faster: float) -> Wan | None:
    wan = scenario.wan
    if wan is None:
        return None
    return Wan(
        second_site=(ranks + 1) // 2,
        bytes_per_s=1e6 / 8 * wan.rate_mbit_s * faster,
        delay_s=wan.delay_s,
        loss=wan.loss_frac,
        queue_bytes=round(wan.queue_bytes * faster),
    )


def _faults(
    scenario: HostScenario, ranks: int, faster: float, least_s: float
) -> tuple[tuple[Freeze, ...], tuple[Partition, ...]]:
    """The freezes and partitions of a run. Repeated ones end after fifty times the shortest possible run."""
    for fault in scenario.faults:
        if fault.host >= ranks:
            raise ConfigError(f"{scenario.name} troubles rank {fault.host}; give --ranks above that")
    first_s = min((fault.at_s for fault in scenario.faults), default=0.0) / faster
    sooner_s = max(0.0, first_s - FIRST_FAULT_SHARE * least_s)
    horizon_s = 50 * least_s + first_s
    freezes, partitions = [], []
    open_s: dict[tuple[int, str], float] = {}
    for event in takewhile(lambda event: event.at_s / faster < horizon_s, schedule(scenario)):
        at_s = event.at_s / faster - sooner_s
        if event.action == "kill":
            freezes.append(Freeze(event.host, at_s, None))
        elif event.action in ("freeze", "link down"):
            open_s[event.host, event.action] = at_s
        elif event.action == "release":
            freezes.append(Freeze(event.host, open_s.pop((event.host, "freeze")), at_s))
        else:
            partitions.append(Partition(open_s.pop((event.host, "link down")), at_s, (event.host,)))
    return tuple(freezes), tuple(partitions)
