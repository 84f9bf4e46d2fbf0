"""Totals of a group: what its ops and its network have cost so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from tailcut.epsilon import NO_ERROR, Epsilon
from tailcut.mirror import NO_TRAFFIC, Traffic, plain, summed


class OpBounds(NamedTuple):
    """What an op may take at most, derived from ``Config.deadline_s`` and earlier ops (docs/time.md)."""

    scatter_s: float
    """t_B of SCATTER, from the entry of the majority."""
    scatter_cap_s: float
    """The longest SCATTER, from the entry of the first rank."""
    gather_s: float
    """t_B of GATHER: the op ends by the entry of the majority plus both stages' t_B."""
    scatter_grace_s: float
    """t_C: how long SCATTER still waits when the last-percentile packets of all ranks have come."""
    gather_grace_s: float
    deadline_s: float
    """The longest op, from the rank's own entry."""
    absent_s: float = 0.0
    """How long SCATTER waits for ranks that have not entered when all others have delivered. 0: until t_B."""


StandingName = Literal["on time", "late", "slow", "stuck", "dead"]
"""late: its contribution was not used. slow: so it was in more than ``Config.straggler_share`` of the latest
ops. stuck: its engine answers, and its program enters no op. dead: it is silent, so it may also be frozen or
cut off."""


class Standing(NamedTuple):
    """How a rank stands with the group, as this rank sees it."""

    name: StandingName = "on time"
    since_op: int | None = None
    """The op with which that began; None if the rank is on time."""
    for_s: float = 0.0
    """How long it has lasted, up to the latest op."""
    unused_ops: int = 0
    """Ops of the whole run whose mean of this rank's shard lacked its contribution."""
    waited_s: float = 0.0
    """How long this rank's shard has waited for it in vain, longer than SCATTER usually takes."""
    returns: int = 0
    """How often it came back after it was stuck or dead."""

    def __str__(self) -> str:
        text: str = self.name
        if self.since_op is not None:
            text += f" since op {self.since_op} ({self.for_s:.3g} s)"
        if self.returns:
            text += f", back {self.returns} time{'s' * (self.returns > 1)}"
        return f"{text}, {self.unused_ops} ops without its contribution, {self.waited_s:.2g} s waited for it"


ON_TIME_STANDING = Standing()


@dataclass
class Stats:
    """Totals since the group opened."""

    ops: int = 0
    partial_ops: int = 0
    """Ops that ended before all means had come, because of the deadline or a bound derived from it."""
    lossy_ops: int = 0
    """Ops of which a part of some mean did not come in time or was EMPTY (``lost_coordinates``)."""
    short_means: int = 0
    """Ops in which this rank, as owner, computed a mean without a part of some rank's contribution."""
    behind_ops: int = 0
    """How many ops this rank was behind when it had to rejoin the group."""
    coordinates: int = 0
    """Coordinates of all results."""
    lost_coordinates: int = 0
    """Of these, those whose mean did not come in time or was EMPTY. They are zero, or, with a key and
    ``late="carry"``, stand for what follows with the next op of the key."""
    late_coordinates: int = 0
    """Of the lost coordinates, those whose mean came by the end of the next op."""
    late_completions: int = 0
    """Stages that were cut and whose missing packets all came later."""
    traffic: Traffic = NO_TRAFFIC
    feedback_packets: int = 0
    """Packets sent without values: what has come, how far this rank is, goodbyes."""
    feedback_bytes: int = 0
    probe_packets: int = 0
    """Of the feedback packets, those that ask for an answer."""
    state_packets: int = 0
    """Packets sent to compare and to copy blocks of the training state (docs/resync.md)."""
    state_bytes: int = 0
    lost_packets: int = 0
    """Contributions and means that were sent and found lost."""
    evicted_means: int = 0
    """Means evicted before a late peer had fetched them: the window or the pool was too small."""
    evicted_shards: int = 0
    """Shards evicted in ops that this rank had not entered yet, because the pool was too small."""
    carried_contributions: int = 0
    """Coordinates of contributions that came too late for their op and entered a later mean of this rank
    (docs/late.md)."""
    carried_means: int = 0
    """Coordinates of means that came too late for their op and were added to a later result."""
    dropped_late_coords: int = 0
    """Coordinates that came too late and could not be carried any more."""
    evicted_late: int = 0
    """Ops whose late parts were given up because ``Config.pool_bytes`` was used up."""
    split_verdicts: int = 0
    """Ops that others skipped for an Inf or a NaN, of which this rank learned only after it had applied its
    result."""
    uncorrected_packets: int = 0
    """Packets received that a switch had trimmed without correcting their lengths."""
    epoch: int = 0
    """The number of the agreement on the owners of shards that the last op went by (docs/epochs.md)."""
    owner_weights: tuple[int, ...] = ()
    """By rank: how much it owns in that epoch, relative to the others; empty where there are no epochs."""
    drift: float = 0.0
    """With ``attach``: how far this replica is from the others, relative to the norm of its parameters. It is
    estimated, from blocks that were compared in turns (docs/resync.md)."""
    skipped_steps: int = 0
    """With ``attach``: steps of the others that this rank did not compute. It took their means instead
    (docs/pytorch.md)."""
    resynced_blocks: int = 0
    """Blocks of this replica that differed and were corrected."""
    resynced_bytes: int = 0
    """What was copied to correct blocks, and by ``resync()`` between ranks."""
    rejoins: int = 0
    """With ``attach``: how often this rank was further behind than the window and fetched the state of the
    others (docs/resync.md)."""
    rejoined_bytes: int = 0
    """What it has fetched for that."""
    outside_stalls: int = 0
    """With ``attach``: collectives that tailcut does not bound, and that took longer than the deadline."""
    outside_stalled_s: float = 0.0
    """How long these took together, as far as they have been seen."""
    contributing: bool = True
    """False after this rank was too far behind, until it has rejoined or ``resynced()`` is called."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Datagrams dropped, by reason (docs/wire-format.md)."""
    blocked_sends: int = 0
    """How often the kernel had no room for a packet, which was then sent later."""
    failed_sends: int = 0
    """Packets that the kernel refused to send."""
    pool_used_bytes: int = 0
    """How much of ``Config.pool_bytes`` is in use now."""
    memory_bytes: int = 0
    """Memory in use now, without the buckets."""
    rtt_s: tuple[float, ...] = ()
    """Last smoothed round-trip time to each rank, 0 while unknown."""
    bounds: dict[int, OpBounds] = field(default_factory=dict)
    """The bounds of the next op, by its size in coordinates of 16 planes; with raw, in coordinates."""
    epsilon: Epsilon = NO_ERROR
    """What the ops have added to the error of the mean gradient, by source: the mean over ops
    (docs/budget.md)."""
    recent_epsilon: Epsilon = NO_ERROR
    """The same for the latest ops."""
    budget: float = 0.0
    """The limit for ``epsilon.total``."""
    lr_scale: float = 1.0
    """1/(1 + ε), announced by rank 0 and equal on all ranks: an optional factor for the learning rate."""
    verdicts: tuple[dict[str, int], ...] = ()
    """By rank: in how many ops it was on time, compute-late, network-late, lossy or silent."""
    standings: tuple[Standing, ...] = ()
    """By rank: whether it is on time, late, slow, stuck or dead, since when, and what that has cost. Ranks
    outside the row of a grid are on time."""
    drop_share: tuple[float, ...] = ()
    """By rank: the share of the last 100 ops in which its contribution to this rank's shard was not used."""

    @property
    def lost_frac(self) -> float:
        """The share of all results whose mean did not come in time or was EMPTY (``lost_coordinates``)."""
        return self.lost_coordinates / self.coordinates if self.coordinates else 0.0

    def __str__(self) -> str:
        text = f"{self.ops} ops, {self.partial_ops} partial, {self.lost_frac:.2%} of the results lost, "
        text += f"{self.short_means} means without somebody's part; "
        sent, received = self.traffic.sent_bytes, self.traffic.received_bytes
        text += f"{with_unit(sent)} sent, {with_unit(received)} received"
        if self.budget:
            text += (
                f"; this run spent {self.epsilon.total:.1%} of its {self.budget:.1%}{self.epsilon.sources()}"
            )
        if self.drift or self.resynced_bytes:
            text += f"; drift {self.drift:.1g}, {with_unit(self.resynced_bytes)} resynced"
        if self.rejoins:
            text += f"; rejoined {self.rejoins} times, with {with_unit(self.rejoined_bytes)}"
        if self.outside_stalls:
            text += f"; {self.outside_stalls} stalls outside tailcut, of {self.outside_stalled_s:.2g} s"
        text += "".join(f"; {note}" for note in self._notes())
        return text if self.contributing else f"{text}; too far behind, contributes nothing until resynced"

    def _notes(self) -> list[str]:
        """Notes on the worst three of the ranks that are in trouble, or often were."""
        often = []
        for rank, counts in enumerate(self.verdicts):
            faults = {verdict: count for verdict, count in counts.items() if verdict != "on time" and count}
            if sum(faults.values()) > _OFTEN * sum(counts.values()):
                often.append((sum(faults.values()), rank, faults))
        worst = sorted(often, key=lambda fault: (-fault[0], fault[1]))[:3]
        return [
            f"rank {rank}: "
            + ", ".join(f"{verdict} in {count} ops" for verdict, count in faults.items())
            + self._standing_of(rank)
            for _, rank, faults in worst
        ]

    def _standing_of(self, rank: int) -> str:
        standing = self.standings[rank] if rank < len(self.standings) else ON_TIME_STANDING
        return f" ({standing})" if standing.unused_ops else ""

    def to_dict(self) -> dict[str, Any]:
        """Every field and ``lost_frac`` by name, as values that JSON has. Named tuples (``traffic``,
        ``epsilon``, each of the ``bounds``) become objects, and tuples by rank become lists."""
        return {**{f.name: plain(getattr(self, f.name)) for f in fields(self)}, "lost_frac": self.lost_frac}

    def counts(self) -> dict[str, Any]:
        """The totals that only ever grow and so add up over the runs of one training, as plain values."""
        return {name: plain(getattr(self, name)) for name in _COUNTS}

    def plus(self, counts: Mapping[str, Any]) -> Stats:
        """These totals plus the counts of earlier runs. A count that this version does not know is left
        out."""
        sums = {name: getattr(self, name) for name in _COUNTS if name != "traffic"}
        earlier = counts.get("traffic", {})
        traffic = Traffic(**{name: earlier.get(name, 0) for name in Traffic._fields})
        return replace(
            self,
            **{name: value + counts.get(name, 0) for name, value in sums.items()},
            traffic=summed(self.traffic, traffic),
        )


_LEVELS = ("epoch", "pool_used_bytes", "memory_bytes")
"""Fields that say how it is now, and so do not add up."""

_COUNTS = tuple(f.name for f in fields(Stats) if type(f.default) in (int, Traffic) and f.name not in _LEVELS)

_OFTEN = 0.01
"""A rank's verdicts are mentioned if more than this share of its ops had a fault."""


def with_unit(count_bytes: float) -> str:
    """A number of bytes as a person reads it."""
    for unit in ("B", "kB", "MB"):
        if count_bytes < 1000:
            return f"{count_bytes:.3g} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.3g} GB"
