"""Totals of a group: what its ops and its network have cost so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class Stats:
    """Totals since the group opened."""

    ops: int = 0
    deadline_ops: int = 0
    """Ops that the deadline ended."""
    lossy_ops: int = 0
    """Ops with zeros in the result because a mean did not come or was EMPTY."""
    partial_ops: int = 0
    """Ops in whose mean, in this rank's own shard, a part of somebody's contribution is missing."""
    behind_ops: int = 0
    lost_coordinates: int = 0
    coordinates: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_packets: int = 0
    received_packets: int = 0
    uncorrected_packets: int = 0
    """Received ones that a switch has trimmed without correcting their lengths."""
    late_gather_packets: int = 0
    """Means that came after their op had ended: not lost, but not in the result."""
    dropped_history: int = 0
    """Means given up before a late peer had fetched them: the window or the pool was too small."""
    forfeited_shards: int = 0
    """Shards of ops not entered yet that this rank gave up serving, because the pool was too small."""
    contributing: bool = True
    """False after this rank was too far behind, until ``resynced()``."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Datagrams dropped, by reason (docs/wire-format.md)."""
    blocked_sends: int = 0
    failed_sends: int = 0
    pool_used_bytes: int = 0
    memory_bytes: int = 0
    rtt_s: tuple[float, ...] = ()
    """Last smoothed round-trip time to each rank, 0 while unknown."""

    @property
    def lost_frac(self) -> float:
        """The share of all results that is zero because a mean did not come or was EMPTY."""
        return self.lost_coordinates / self.coordinates if self.coordinates else 0.0

    def __str__(self) -> str:
        text = f"{self.ops} ops, {self.deadline_ops} ended by the deadline, "
        text += (
            f"{self.lost_frac:.2%} of the results lost, {self.partial_ops} means without somebody's part; "
        )
        text += f"{_with_unit(self.sent_bytes)} sent, {_with_unit(self.received_bytes)} received"
        return text if self.contributing else f"{text}; too far behind, contributes nothing until resynced"

    def counts(self) -> dict[str, int]:
        """What only ever grows, and so adds up over the runs of one training."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_COUNTS}

    def plus(self, counts: Mapping[str, int]) -> Stats:
        """These totals and the counts of earlier runs; a count this version does not know is left out."""
        sums: dict[str, Any] = {name: count + counts.get(name, 0) for name, count in self.counts().items()}
        return replace(self, **sums)


_NOT_COUNTS = ("contributing", "rejected", "pool_used_bytes", "memory_bytes", "rtt_s")


def _with_unit(count_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count_bytes < 1000:
            return f"{count_bytes:.3g} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.3g} GB"
