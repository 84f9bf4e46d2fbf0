"""A simulated network as values: one switch, its ports, and what goes wrong there. Frozen and checked once.

native/sim/network.hpp decides what happens to packets. This module knows nothing of what runs on the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailcut import _native
from tailcut.errors import ConfigError

TCP_HEADER_BYTES = 32
"""The TCP header with timestamps, as Linux sends it."""
TCP_FRAME_BYTES = 14 + 20 + TCP_HEADER_BYTES
"""The headers of Ethernet, IPv4 and TCP."""


@dataclass(frozen=True)
class Partition:
    """The ranks of ``side`` and all other ranks do not reach each other."""

    from_s: float
    until_s: float
    side: tuple[int, ...]


@dataclass(frozen=True)
class RateChange:
    """From ``at_s`` on, a host's links have their nominal rate times a factor: 0.2 is five times slower."""

    at_s: float
    host: int | None
    """The host; None means every host."""
    uplink_factor: float = 1.0
    downlink_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Bursts:
    """Background traffic into every port. Its times depend only on the seed and the port."""

    volume_bytes: int
    gap_min_s: float
    """The shortest gap between two bursts to a port."""
    gap_mean_s: float
    """The mean of an exponential time that is added to ``gap_min_s``."""
    bytes_per_s: float = 0.0
    """The rate at which a burst reaches the port; with 0 all of it comes at once, as from many hosts."""
    packet_bytes: int = 1500


@dataclass(frozen=True, kw_only=True)
class NeighbourFlows:
    """Other people send TCP flows (CUBIC): one at a time into every port, from behind the port before it."""

    flow_bytes: int
    gap_mean_s: float
    """The mean of the exponential pause from the end of a flow to the next one into the same port."""
    segment_bytes: int = 1448


@dataclass(frozen=True, kw_only=True)
class BurstyLoss:
    """The Gilbert-Elliott model: a port is in a good or a bad state, and may change it at every packet."""

    enter: float
    """The probability of a change from good to bad."""
    leave: float
    """The probability of a change from bad to good."""
    loss: float = 1.0
    """The probability of loss in the bad state."""


@dataclass(frozen=True, kw_only=True)
class Wan:
    """Two sites with one link between them. Ranks from ``second_site`` on are in the second one."""

    second_site: int
    bytes_per_s: float
    delay_s: float
    """The delay in one direction, which is added to that of the network."""
    loss: float = 0.0
    queue_bytes: int = 0
    """What the link holds; 0 is unlimited."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a testbed. Its links are token buckets, and all its hosts share its cores."""

    cores: int
    packet_cost_s: float
    """The time of one core that a packet takes, from its sender to its receiver."""
    bucket_bytes: int
    """What a link carries at once after a pause."""


@dataclass(frozen=True, kw_only=True)
class SimulatedNetwork:
    """One switch with a port for every host. Times are in seconds, probabilities are per packet."""

    seed: int = 0
    """Everything random derives from it."""
    loss: float = 0.0
    bursty_loss: BurstyLoss | None = None
    duplicate: float = 0.0
    corrupt: float = 0.0
    trim: float = 0.0
    trim_to_bytes: int = 0
    """How many bytes are left of a trimmed packet, with its header; 0 leaves any number."""
    trim_above_bytes: int = 0
    """A port with a longer backlog trims every packet that it may; 0 never does."""
    delay_s: float = 10e-6
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    """The rate of every link; 0 is unlimited."""
    uplink_bytes_per_s: float | None = None
    """The rate from hosts to the switch, if it differs."""
    queue_bytes: int = 0
    """What every port of the switch holds; 0 is unlimited."""
    frame_bytes: int = 0
    """What lower layers add to a packet on links and in queues. Ethernet, IPv4 and UDP add 42 bytes."""
    partitions: Sequence[Partition] = ()
    rate_changes: Sequence[RateChange] = ()
    bursts: Bursts | None = None
    neighbours: NeighbourFlows | None = None
    wan: Wan | None = None
    machine: Machine | None = None
    """If it is given, all hosts are on one machine. Otherwise packets cost no processor time."""

    def check_network(self) -> None:
        """Raise ConfigError unless the values make sense."""
        for name in ("loss", "duplicate", "corrupt", "trim"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not a probability")
        if 0 < self.trim_to_bytes <= _native.HEADER_BYTES:
            raise ConfigError(f"trim_to_bytes={self.trim_to_bytes} leaves nothing behind the header")
        for change in self.rate_changes:
            if change.uplink_factor <= 0 or change.downlink_factor <= 0:
                raise ConfigError(f"{change} stops a link: its factors must be above 0; use a Partition")
        if (machine := self.machine) and (machine.cores < 1 or machine.packet_cost_s < 0):
            raise ConfigError(f"{machine} needs a core and a packet_cost_s that is not negative")
        if self.bursts and (self.bursts.gap_min_s <= 0 or self.bursts.gap_mean_s < 0):
            raise ConfigError("bursts need a gap_min_s above 0, or there is no end of them")
        if (flows := self.neighbours) and (flows.flow_bytes <= 0 or flows.gap_mean_s <= 0):
            raise ConfigError("neighbours need flow_bytes and a gap_mean_s above 0")

    def fill(self, spec: _native.NetworkSpec) -> None:
        """Copy the values into those of the native network."""
        for name in (
            *("seed", "loss", "duplicate", "corrupt", "trim", "trim_above_bytes"),
            *("bytes_per_s", "queue_bytes", "frame_bytes"),
        ):
            setattr(spec, name, getattr(self, name))
        spec.delay_ns = ns(self.delay_s)
        spec.jitter_ns = ns(self.jitter_s)
        spec.trim_to_payload_bytes = max(0, self.trim_to_bytes - _native.HEADER_BYTES)
        if self.uplink_bytes_per_s is not None:
            spec.uplink_bytes_per_s = self.uplink_bytes_per_s
        for cut in self.partitions:
            spec.partition(ns(cut.from_s), ns(cut.until_s), list(cut.side))
        for change in self.rate_changes:
            spec.change_rate(ns(change.at_s), change.host, change.uplink_factor, change.downlink_factor)
        if (bursty := self.bursty_loss) is not None:
            spec.set_bursty_loss(bursty.enter, bursty.leave, bursty.loss)
        if (bursts := self.bursts) is not None:
            spec.set_bursts(
                bytes=bursts.volume_bytes,
                bytes_per_s=bursts.bytes_per_s,
                packet_bytes=bursts.packet_bytes,
                gap_min_ns=ns(bursts.gap_min_s),
                gap_mean_ns=ns(bursts.gap_mean_s),
            )
        if (flows := self.neighbours) is not None:
            spec.set_neighbours(
                flow_bytes=flows.flow_bytes,
                gap_mean_ns=ns(flows.gap_mean_s),
                segment_bytes=flows.segment_bytes,
                header_bytes=TCP_FRAME_BYTES - self.frame_bytes,
            )
        if (wan := self.wan) is not None:
            spec.set_wan(wan.second_site, wan.bytes_per_s, ns(wan.delay_s), wan.loss, wan.queue_bytes)
        if (machine := self.machine) is not None:
            spec.set_machine(machine.cores, ns(machine.packet_cost_s), machine.bucket_bytes)


def ns(seconds: float) -> int:
    return round(seconds * 1e9)
