"""A scenario as values: the hosts, their ports, what the switch does to packets, what happens to processes.

The values are frozen and checked once. They know nothing of namespaces, of files or of time.
"""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tailcut.errors import ConfigError

ANY = "any"
ETHERNET_BYTES = 14
HEADERS_BYTES = ETHERNET_BYTES + 20 + 8
BURST_SPEED = 6
"""A burst comes this many times faster than its port carries it, as from so many hosts. At 200 Mbit/s and MTU
1500 that is a packet every 10 us, which one process can send."""
MAX_TRIM_FRAME_BYTES = 1024
"""trim.bpf.c cannot sum longer payloads."""


def _matches(value: Any, hint: Any) -> bool:
    """Return whether a value read from TOML is of the type that a field is annotated with."""
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_matches(value, argument) for argument in arguments)
    if get_origin(hint) is Literal:
        return value in arguments
    if get_origin(hint) is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1:] == (...,) else arguments
        return len(kinds) == len(value) and all(map(_matches, value, kinds))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint


class _Checked:
    """Checks types first, so that the checks of each class can rely on them."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if not _matches(value := getattr(self, name), hint):
                wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
                raise ConfigError(f"{name} = {value!r} is not of type {wanted}")
        self._check()

    def _check(self) -> None:
        """Raise ConfigError unless the values make sense."""

    def _fractions(self, *names: str) -> None:
        for name in names:
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ConfigError(f"{name} = {value} must be between 0 and 1")

    def _positive(self, *names: str) -> None:
        for name in names:
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"{name} = {value} must be above 0")


DEEP_QUEUE_BYTES = 1_000_000
"""Sixteen of the largest super-packets. A queue that holds fewer drops single packets."""


@dataclass(frozen=True, kw_only=True)
class Port(_Checked):
    """Every host's link to the switch."""

    rate_mbit_s: float = 200.0
    """The rate from the switch to the host. Two cores carry four ports of 200 at MTU 1500, or of 1000 at
    MTU 9000."""
    uplink_mbit_s: float | None = None
    """The rate from the host to the switch. The default is ``rate_mbit_s``; 0 is unlimited."""
    mtu_bytes: int = 1500
    queue_bytes: int = 8_000_000
    """What a port of the switch holds; the rest is dropped. Less gives earlier loss and shorter delays."""
    burst_bytes: int | None = None
    """What a link sends at once after a pause. The default is 2 ms of its rate. Less is truer for small
    messages, but late timers cost rate: TCP at 200 Mbit/s got 190 to 196 with 2 ms, 151 to 188 with 1 ms."""

    def _check(self) -> None:
        self._positive("rate_mbit_s", "queue_bytes")
        if self.burst_bytes is not None and self.burst_bytes < 2 * self.mtu_bytes:
            raise ConfigError(f"burst_bytes = {self.burst_bytes} must hold two packets: raise it")
        if self.uplink_mbit_s is not None and self.uplink_mbit_s < 0:
            raise ConfigError(f"uplink_mbit_s = {self.uplink_mbit_s} must not be negative; 0 is unlimited")
        if not 576 <= self.mtu_bytes <= 9000:
            raise ConfigError(f"mtu_bytes = {self.mtu_bytes} must be between 576 and 9000")
        if self.queue_bytes < 2 * self.mtu_bytes:
            raise ConfigError(f"queue_bytes = {self.queue_bytes} must hold two packets: raise it")

    @property
    def uplink(self) -> float:
        return self.rate_mbit_s if self.uplink_mbit_s is None else self.uplink_mbit_s


@dataclass(frozen=True, kw_only=True)
class SlowPort(_Checked):
    """The link of one host is slower than the others', both ways."""

    host: int
    rate_frac: float
    """Its rate, as a share of theirs."""

    def _check(self) -> None:
        self._positive("rate_frac")
        self._fractions("rate_frac")


@dataclass(frozen=True, kw_only=True)
class BurstyLoss(_Checked):
    """Gilbert-Elliott: a port is in a good or a bad state and may change with every packet."""

    enter_frac: float
    """The probability of a change from good to bad."""
    leave_frac: float
    """The probability of a change from bad to good. Bursts are 1 / leave_frac packets long on average."""
    loss_frac: float = 1.0
    """The share of packets that is lost in the bad state."""

    def _check(self) -> None:
        self._fractions("enter_frac", "leave_frac", "loss_frac")
        self._positive("enter_frac", "leave_frac")

    @property
    def mean_loss_frac(self) -> float:
        return self.loss_frac * self.enter_frac / (self.enter_frac + self.leave_frac)


@dataclass(frozen=True, kw_only=True)
class Switch(_Checked):
    """What every port of the switch does to the packets that leave by it."""

    loss_frac: float = 0.0
    """The share of IPv4 packets of any kind that is lost at random."""
    bursty_loss: BurstyLoss | None = None
    trim_frac: float = 0.0
    """The share of packets of the trimmable class that is trimmed at random."""
    trim_above_bytes: int | None = None
    """Above this backlog packets of the trimmable class are trimmed. None trims none for that reason."""
    trim_frame_bytes: int = 256
    """What is left of a trimmed packet, Ethernet header included. 256 is common in switches, 128 exists."""
    lengths: Literal["fix-lengths", "leave-lengths"] = "fix-lengths"
    """Whether the IP and UDP lengths and checksums of a trimmed packet are corrected."""
    trimmable_ports: tuple[int, int] = (1024, 65535)
    """The trimmable class is UDP to these ports ..."""
    trimmable_dscp: int | Literal["any"] = "any"
    """... with this DSCP."""
    trimmed_dscp: int = 48
    """The mark of a trimmed packet. SONiC's documents show 48."""

    def _check(self) -> None:
        self._fractions("loss_frac", "trim_frac")
        if not HEADERS_BYTES < self.trim_frame_bytes <= MAX_TRIM_FRAME_BYTES:
            raise ConfigError(
                f"trim_frame_bytes = {self.trim_frame_bytes} must be above the headers' {HEADERS_BYTES} "
                f"and at most {MAX_TRIM_FRAME_BYTES}"
            )
        if self.trim_above_bytes is not None and self.trim_above_bytes < 0:
            raise ConfigError(f"trim_above_bytes = {self.trim_above_bytes} must not be negative")
        low, high = self.trimmable_ports
        if not 0 <= low <= high <= 0xFFFF:
            raise ConfigError(f"trimmable_ports = {[low, high]} is not a first and a last UDP port")
        for name in ("trimmable_dscp", "trimmed_dscp"):
            if (value := getattr(self, name)) != ANY and not 0 <= value < 64:
                raise ConfigError(f"{name} = {value} must be between 0 and 63")
        if self.trimmable_dscp == self.trimmed_dscp:
            raise ConfigError("trimmable_dscp and trimmed_dscp are the same: nothing would ever be trimmed")

    @property
    def trims(self) -> bool:
        return self.trim_above_bytes is not None or self.trim_frac > 0

    @property
    def touches_packets(self) -> bool:
        """Return whether a bridge with a rate limit is not enough."""
        return self.trims or self.loss_frac > 0 or self.bursty_loss is not None


@dataclass(frozen=True, kw_only=True)
class Bursts(_Checked):
    """Other people send bursts into every port. Each comes BURST_SPEED times faster than the port carries
    it, and what is behind it waits."""

    burst_bytes: int
    """The payload of one burst. At 200 Mbit/s and MTU 1500, 1 MB blocks a port for 41 ms."""
    gap_min_s: float
    """The least time from a burst to the next one to the same port. It is longer than a burst takes."""
    gap_mean_s: float
    """The mean of an exponential time on top of ``gap_min_s``."""

    def _check(self) -> None:
        self._positive("burst_bytes", "gap_min_s", "gap_mean_s")

    def frames_bytes(self, mtu_bytes: int) -> int:
        """Return the bytes of a burst on the wire, where all its packets are full."""
        return math.ceil(self.burst_bytes / burst_payload_bytes(mtu_bytes)) * (mtu_bytes + ETHERNET_BYTES)


def burst_payload_bytes(mtu_bytes: int) -> int:
    """Return the payload of one packet of a burst."""
    return mtu_bytes + ETHERNET_BYTES - HEADERS_BYTES


def burst_frames_per_s(port: Port) -> float:
    """Return how fast the packets of a burst come."""
    return BURST_SPEED * 1e6 / 8 * port.rate_mbit_s / (port.mtu_bytes + ETHERNET_BYTES)


@dataclass(frozen=True, kw_only=True)
class Tail(_Checked):
    """Bursts into every port that are sized so that P99/P50 of a message's time is ``ratio``."""

    ratio: float
    message_bytes: int = 1_000_000
    """The message that the ratio is for: give it the size of your op's shard."""
    gap_min_s: float = 0.3
    """The least time between bursts to a port. It is so long that they do not overlap."""
    gap_mean_s: float = 0.5
    """The mean of an exponential time on top of it. If it is too long, P99 no longer meets a burst."""

    def _check(self) -> None:
        self._positive("message_bytes", "gap_min_s", "gap_mean_s")
        if not 1 < self.ratio <= 20:
            raise ConfigError(f"ratio = {self.ratio} must be above 1 and at most 20")

    @property
    def bursts(self) -> Bursts:
        return Bursts(
            burst_bytes=round((self.ratio - 1) * self.message_bytes),
            gap_min_s=self.gap_min_s,
            gap_mean_s=self.gap_mean_s,
        )


@dataclass(frozen=True, kw_only=True)
class Neighbours(_Checked):
    """Other people send TCP flows: one at a time into every port, from behind the port before it."""

    flow_bytes: int
    """The length of a flow. Each has a connection of its own. At 200 Mbit/s, 5 MB take 0.2 s alone."""
    gap_mean_s: float
    """The mean of the exponential pause from the end of a flow to the next one into the same port."""

    def _check(self) -> None:
        self._positive("flow_bytes", "gap_mean_s")


@dataclass(frozen=True, kw_only=True)
class Jobs(_Checked):
    """Other people's jobs: each averages a vector between two hosts over TCP, again and again."""

    count: int
    """How many there are. They take the pairs of hosts in turn, the nearest first."""
    op_bytes: int
    """The vector of a job. Both of its hosts send so much, half of it in each of two stages."""
    gap_mean_s: float
    """The mean of the exponential pause from one op of a job to its next."""

    def _check(self) -> None:
        self._positive("count", "op_bytes", "gap_mean_s")

    def pairs(self, hosts: int) -> list[tuple[int, int]]:
        """The hosts of each job."""
        firsts = [(job % hosts, 1 + job // hosts % (hosts - 1)) for job in range(self.count)]
        return [(first, (first + apart) % hosts) for first, apart in firsts]


@dataclass(frozen=True, kw_only=True)
class Wan(_Checked):
    """There are two sites. The second half of the hosts is behind a thin link with a base delay."""

    rate_mbit_s: float = 50.0
    delay_s: float = 0.010
    """The delay one way."""
    loss_frac: float = 0.0
    queue_bytes: int = 1_000_000

    def _check(self) -> None:
        self._positive("rate_mbit_s", "queue_bytes")
        self._fractions("loss_frac")
        if not 0 <= self.delay_s <= 1:
            raise ConfigError(f"delay_s = {self.delay_s} must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class HostFreeze(_Checked):
    """A host's processes are stopped for ``for_s``, once at ``at_s`` or again and again."""

    host: int
    at_s: float
    """The time after the commands have started."""
    for_s: float
    every_s: float = 0.0
    """The mean of the seeded, exponential time from the end of a freeze to the next; 0 freezes once."""

    def _check(self) -> None:
        self._positive("for_s")


@dataclass(frozen=True, kw_only=True)
class HostHang(_Checked):
    """The programs on a host hang: their main threads stand still, and their other threads go on."""

    host: int
    at_s: float
    for_s: float

    def _check(self) -> None:
        self._positive("for_s")


@dataclass(frozen=True, kw_only=True)
class Kill(_Checked):
    """A host's processes are killed."""

    host: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class LinkDown(_Checked):
    """A host's port goes dark and comes back."""

    host: int
    at_s: float
    for_s: float

    def _check(self) -> None:
        self._positive("for_s")


Fault = HostFreeze | HostHang | Kill | LinkDown


@dataclass(frozen=True, kw_only=True)
class HostScenario(_Checked):
    """Everything that a testbed is built from, and a simulation of it."""

    name: str
    description: str = ""
    hosts: int = 4
    seed: int = 0
    """Everything random derives from it."""
    port: Port = field(default_factory=Port)
    slow_ports: tuple[SlowPort, ...] = ()
    switch: Switch = field(default_factory=Switch)
    bursts: Bursts | None = None
    tail: Tail | None = None
    neighbours: Neighbours | None = None
    jobs: Jobs | None = None
    wan: Wan | None = None
    freezes: tuple[HostFreeze, ...] = ()
    hangs: tuple[HostHang, ...] = ()
    kills: tuple[Kill, ...] = ()
    link_downs: tuple[LinkDown, ...] = ()

    def _check(self) -> None:
        if not 2 <= self.hosts <= 64:
            raise ConfigError(f"hosts = {self.hosts} must be between 2 and 64")
        if self.bursts and self.tail:
            raise ConfigError("bursts and tail exclude each other: a tail is made of bursts of its own")
        if self.neighbours and self.jobs:
            raise ConfigError("neighbours and jobs exclude each other: take one of them out")
        if self.background and self.wan:
            name = "tail" if self.tail else "bursts"
            raise ConfigError(f"{name} and wan exclude each other: bursts come from the first site only")
        burst = self.background
        if burst and (needed := burst.frames_bytes(self.port.mtu_bytes)) > self.port.queue_bytes:
            raise ConfigError(
                f"a burst is {needed} bytes on the wire, and a port holds queue_bytes = "
                f"{self.port.queue_bytes}: raise that, or the rest of the burst is dropped"
            )
        for slow in self.slow_ports:
            if not 0 <= slow.host < self.hosts:
                raise ConfigError(f"a slow port names host {slow.host}; the hosts are 0 to {self.hosts - 1}")
        for fault in self.faults:
            if not 0 <= fault.host < self.hosts:
                raise ConfigError(f"a fault names host {fault.host}; the hosts are 0 to {self.hosts - 1}")
            if fault.at_s < 0:
                raise ConfigError(f"a fault has at_s = {fault.at_s}, which must not be negative")

    def rate_frac(self, host: int) -> float:
        """The rate of a host's link, as a share of the port's."""
        return math.prod(slow.rate_frac for slow in self.slow_ports if slow.host == host)

    @property
    def background(self) -> Bursts | None:
        """The bursts of other people's traffic, whichever table asks for them."""
        return self.tail.bursts if self.tail else self.bursts

    @property
    def carries_super_packets(self) -> bool:
        """Whether many segments may cross the switch as one packet: nothing on the way looks at single ones,
        and a port holds many of them."""
        return not self.switch.touches_packets and not self.wan and self.port.queue_bytes >= DEEP_QUEUE_BYTES

    @property
    def has_neighbours(self) -> bool:
        """Whether somebody else is behind every port."""
        return self.neighbours is not None or self.jobs is not None

    @property
    def faults(self) -> tuple[Fault, ...]:
        return (*self.freezes, *self.hangs, *self.kills, *self.link_downs)

    @property
    def stops_processes(self) -> bool:
        return bool(self.freezes or self.hangs or self.kills)


def known_fields(kind: type) -> list[str]:
    return [entry.name for entry in fields(kind)]
