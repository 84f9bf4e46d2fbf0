"""The structs of a native report as named tuples with the same fields (native/protocol/reports/report.hpp).

Owns what every field means to a user, and how values add up and look in JSON. A class here and the list of
fields of its native struct are the only two places that know of a field; importing checks that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar

from tailcut import _native

T = TypeVar("T")

Stage = Literal["scatter", "gather"]
Ending = Literal["all", "grace", "absent", "bound", "deadline"]
"""What ended a stage, and with GATHER the op. all: everything had come. grace: the grace after the
last-percentile packets had passed (t_C). absent: all who had entered had delivered, and the rest was not
waited for. bound: the stage's own bound had passed (t_B, or its cap). deadline:
the op's deadline had passed."""

LR_PERIOD_OPS = 64
"""A factor of the learning rate begins to hold at an op whose number is a multiple of this."""


class Traffic(NamedTuple):
    """Packets and bytes, of one op until it ended or of a group since it opened."""

    sent_packets: int = 0
    sent_bytes: int = 0
    """Of an op: until it ended here. Means that peers fetch later are only in ``Group.stats()``."""
    received_packets: int = 0
    received_bytes: int = 0
    multicast_packets: int = 0
    """Of those sent: one datagram for many ranks."""
    resent_packets: int = 0
    """Of those sent: sent again because the receiver reported them lost while the stage was open."""
    trimmed_packets: int = 0
    """Of those received: trimmed by a switch."""
    late_packets: int = 0
    """Contributions and means that came after their stage had ended: they are not lost, but not in the
    result."""


NO_TRAFFIC = Traffic()


class StageReport(NamedTuple):
    """One stage of an op at this rank. Times are in seconds since the rank's own entry, negative before
    it."""

    planes: int = 0
    """Bits per coordinate of what this rank sent in the stage, contributions or its mean; 0: raw 32-bit
    floats."""
    ended_by: Ending = "all"
    began_s: float | None = None
    """SCATTER: the ⌈N/2⌉-th rank entered; None if that is not known. GATHER: this rank's own shard closed, or
    this rank entered, whichever came later."""
    ended_s: float | None = None
    """SCATTER: this rank's own shard closed. GATHER: the op ended."""
    coords: int = 0
    """Coordinates that were to come from all ranks, including this rank."""
    missing: int = 0
    """Of these, those that did not come in time."""
    empty: int = 0
    """GATHER: those that came EMPTY because nobody's contribution had reached their owner."""

    @property
    def took_s(self) -> float | None:
        """How long the stage lasted; None if its start is not known."""
        if self.began_s is None or self.ended_s is None:
            return None
        return max(0.0, self.ended_s - self.began_s)


NO_STAGE = StageReport()


class LinkStage(NamedTuple):
    """What came from one rank in one stage. SCATTER: its contribution to this rank's shard. GATHER: the mean
    of its own shard."""

    coords: int = 0
    """Coordinates of the shard."""
    missing: int = 0
    """Of these, those that did not come in time."""
    empty: int = 0
    """GATHER: those that came EMPTY."""
    last_s: float | None = None
    """When the latest packet came, since this rank's own entry; None: nothing came."""

    @property
    def lost_frac(self) -> float:
        """The share that did not come in time."""
        return self.missing / self.coords if self.coords else 0.0

    @property
    def empty_frac(self) -> float:
        """The share that came EMPTY."""
        return self.empty / self.coords if self.coords else 0.0


class Link(NamedTuple):
    """One rank, as this rank saw it in an op."""

    entered_s: float | None = None
    """When it entered the op, as far as its packets told, since this rank's own entry; negative: before
    it."""
    silent: bool = False
    """Nothing has been heard from it for 2 ops: nothing is waited for from it."""
    abstained: bool = False
    """It said that it contributes nothing."""
    scatter: LinkStage = LinkStage()
    gather: LinkStage = LinkStage()
    sent_packets: int = 0
    """DATA packets sent to it since the last report."""
    sent_lost_packets: int = 0
    """DATA packets sent to it that were found lost since the last report."""
    received_packets: int = 0
    """DATA packets received from it since the last report."""
    received_lost_packets: int = 0
    """DATA packets that are missing between those received from it since the last report."""
    delivered_bytes: int = 0
    """Of DATA sent to it by unicast, what is known to have come since the last report."""
    in_flight_s: float = 0.0
    """How long any of it was in flight."""
    lacked_frac: float = 0.0
    """The share of this rank's mean that it says it lacked in an op; the largest one told since the last
    report."""
    awaited: bool = True
    """SCATTER of this rank's shard waited for its contribution: one of its last two to the bucket came within
    the bound."""
    behind_ops: int = 0
    """How many ops up to this one it has not entered, as far as is known."""
    left: bool = False
    """It has said goodbye to the group."""

    @property
    def sent_lost_frac(self) -> float:
        """The share of the packets sent to it that was found lost."""
        return self.sent_lost_packets / self.sent_packets if self.sent_packets else 0.0

    @property
    def received_lost_frac(self) -> float:
        """The share of the packets from it that are missing between others."""
        if not self.received_lost_packets:
            return 0.0
        return self.received_lost_packets / (self.received_packets + self.received_lost_packets)


class LateCompletion(NamedTuple):
    """A stage of an earlier op that was cut, and whose missing packets have all come since."""

    seq: int
    stage: Stage
    length: int
    took_s: float
    """How long the stage really took, from its start as in ``StageReport``."""


class LrScale(NamedTuple):
    """A factor of the learning rate that all ranks use from the same op on (docs/budget.md)."""

    scale: float
    period: int
    """It holds from op ``period * LR_PERIOD_OPS`` on, modulo 2**16 periods."""


_native.mirror_reports(
    traffic=Traffic,
    stage=StageReport,
    link_stage=LinkStage,
    link=Link,
    late=LateCompletion,
    lr_scale=LrScale,
)


def summed(a: T, b: T) -> T:
    """The sum of two counts, tuples of counts or counts by name."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return {name: summed(a.get(name, 0), b.get(name, 0)) for name in {**a, **b}}  # type: ignore[return-value]
    if isinstance(a, tuple) and isinstance(b, tuple):
        return type(a)(*map(summed, a, b))
    return a + b  # type: ignore[operator, no-any-return]


def plain(value: Any) -> Any:
    """The value as JSON has it: structs become objects with the names of their fields."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Sequence):
        return [plain(part) for part in value]
    return str(value)
