"""Totals of a group: what its ops and its network have cost so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tailcut.epsilon import NO_ERROR, Epsilon


class OpBounds(NamedTuple):
    """What an op may take at most, by ``Config.deadline_s`` and the ops before it (docs/time.md)."""

    scatter_s: float
    """t_B of SCATTER, from the entry of the majority."""
    scatter_cap_s: float
    """SCATTER from the entry of the first rank."""
    gather_s: float
    """t_B of GATHER, from the close of the rank's own shard, or from its own entry if that is later."""
    scatter_grace_s: float
    """t_C: what SCATTER still waits when the last-percentile packets of all ranks have come."""
    gather_grace_s: float
    deadline_s: float
    """The whole op, from the rank's own entry."""


@dataclass
class Stats:
    """Totals since the group opened."""

    ops: int = 0
    deadline_ops: int = 0
    """Ops that ended before all means had come, by the deadline or a bound derived from it."""
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
    multicast_packets: int = 0
    """Of those sent: one datagram for many ranks."""
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
    bounds: dict[int, OpBounds] = field(default_factory=dict)
    """What the next op may take, by size class: the key is the class's largest size, in coordinates of 16
    planes (of raw, as they are)."""
    epsilon: Epsilon = NO_ERROR
    """What the ops have added to the error of the mean gradient, by source: their mean (docs/budget.md)."""
    recent_epsilon: Epsilon = NO_ERROR
    """The same, of the latest ops."""
    budget: float = 0.0
    """What ``epsilon.total`` may be."""
    lr_scale: float = 1.0
    """1/(1 + ε), announced by rank 0 and alike on all ranks: a factor for the learning rate, if you like."""
    verdicts: tuple[dict[str, int], ...] = ()
    """By rank: in how many ops it was on time, compute-late, network-late, lossy or silent."""
    drop_share: tuple[float, ...] = ()
    """By rank: the share of the last 100 ops in which its contribution to this rank's shard was not used."""

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
        if self.budget:
            text += (
                f"; this run spent {self.epsilon.total:.1%} of its {self.budget:.1%}{self.epsilon.sources()}"
            )
        text += "".join(f"; {note}" for note in self._notes())
        return text if self.contributing else f"{text}; too far behind, contributes nothing until resynced"

    def _notes(self) -> list[str]:
        """Of ranks that were often late, lossy or silent: the worst three."""
        often = []
        for rank, counts in enumerate(self.verdicts):
            faults = {verdict: count for verdict, count in counts.items() if verdict != "on time" and count}
            if sum(faults.values()) > _OFTEN * sum(counts.values()):
                often.append((sum(faults.values()), rank, faults))
        worst = sorted(often, key=lambda fault: (-fault[0], fault[1]))[:3]
        return [
            f"rank {rank}: " + ", ".join(f"{verdict} in {count} ops" for verdict, count in faults.items())
            for _, rank, faults in worst
        ]

    def counts(self) -> dict[str, int]:
        """What only ever grows, and so adds up over the runs of one training."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_COUNTS}

    def plus(self, counts: Mapping[str, int]) -> Stats:
        """These totals and the counts of earlier runs; a count this version does not know is left out."""
        sums: dict[str, Any] = {name: count + counts.get(name, 0) for name, count in self.counts().items()}
        return replace(self, **sums)


_NOT_COUNTS = (
    *("contributing", "rejected", "pool_used_bytes", "memory_bytes"),
    *("rtt_s", "bounds", "verdicts", "drop_share"),
    *("epsilon", "recent_epsilon", "budget", "lr_scale"),
)

_OFTEN = 0.01
"""The share of ops from which on a rank's verdicts are worth a word."""


def _with_unit(count_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count_bytes < 1000:
            return f"{count_bytes:.3g} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.3g} GB"
