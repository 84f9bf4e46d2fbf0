"""What an op cost: frozen values, made once when the op ends."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from tailcut import _native
from tailcut.epsilon import NO_ERROR, Epsilon, quality_of
from tailcut.errors import ClosedError, ConfigError, TailcutError
from tailcut.grid import GridLayout

Status = Literal["complete", "deadline", "behind"]
Stage = Literal["scatter", "gather"]
Ending = Literal["all", "grace", "bound", "deadline"]
"""What ended a stage: everything had come, the grace after the last-percentile packets (t_C), the stage's own
bound (t_B, or its cap), or the deadline of the op."""


class Verdict(str, Enum):
    """What a rank was to this one in an op (docs/time.md)."""

    ON_TIME = "on time"
    COMPUTE_LATE = "compute-late"
    """It entered late."""
    NETWORK_LATE = "network-late"
    """It entered on time; its packets came late, or were still coming when the stage ended."""
    LOSSY_FROM = "lossy link from it"
    LOSSY_TO = "lossy link to it"
    SILENT = "silent"
    """Nothing came from it: dead, frozen or cut off."""

    def __str__(self) -> str:
        return self.value


class LateCompletion(NamedTuple):
    """A stage of an earlier op that was cut, and whose missing packets have all come since."""

    seq: int
    stage: Stage
    length: int
    took_s: float
    """What the stage really took, from the same start as ``scatter_took_s`` and ``gather_took_s``."""


LR_PERIOD_OPS = 64
"""A factor of the learning rate holds from an op on whose number is a multiple of this."""


LR_DIGITS = 3
"""Of such a factor, which travels as fp32 and is to be the same number everywhere."""


class LrScale(NamedTuple):
    """A factor of the learning rate that all ranks use from the same op on (docs/budget.md)."""

    scale: float
    period: int
    """It holds from op ``period * LR_PERIOD_OPS`` on, modulo 2**16 periods."""


@dataclass(frozen=True)
class Report:
    """One op as this rank saw it. Fractions are of coordinates; tuples are indexed by rank: in a grid, by
    place in ``members``."""

    seq: int
    status: Status
    """complete: all was answered; deadline: it ended before (see gather_ended_by), and what did not come is
    zero; behind: see behind_ops."""
    length: int
    elapsed_s: float
    behind_ops: int = 0
    """Above 0: this rank was that many ops behind, more than the window; nothing was reduced, the bucket is
    zero, the rank's seq is now the group's, and it contributes nothing until ``Group.resynced()``."""
    key: Hashable = None
    """Of the bucket, as ``allreduce`` was given it."""
    contributed: bool = True
    non_finite: bool = False
    """Some rank's bucket held an Inf or a NaN; so does the result, on every rank that learned of it."""

    scatter_lost: tuple[float, ...] = ()
    """As owner: the share of this rank's shard that each rank's contribution lacked."""
    abstained: tuple[int, ...] = ()
    """As owner: ranks that said they contribute nothing."""
    gather_lost: tuple[float, ...] = ()
    """As receiver: the share of each owner's shard that did not come in time."""
    gather_empty: tuple[float, ...] = ()
    """As receiver: the share of each owner's shard that came EMPTY: nobody's contribution had reached it."""
    lost_frac: float = 0.0
    """The share of the result that is zero because its mean did not come or was EMPTY."""

    epsilon: Epsilon = NO_ERROR
    """The error that this op added to the mean, by source, as far as this rank knows (docs/budget.md)."""
    correlation: float = 0.0
    """Between the contributions of two ranks, on average: 0 independent, 1 all alike."""
    planes: int = 0
    """Bits a coordinate of what this rank contributed; 0: raw, 32-bit floating point."""
    gather_planes: int = 0
    """Bits a coordinate of the mean that this rank sent as owner."""
    scatter_s: float = 0.0
    """From the entry until this rank closed its own shard; negative if that was done before it entered."""
    sent_bytes: int = 0
    """Until the op ended here; means that peers fetch later are in ``Group.stats()`` only."""
    received_bytes: int = 0
    sent_packets: int = 0
    received_packets: int = 0
    trimmed_packets: int = 0
    resent_packets: int = 0
    """Sent again because the receiver reported them lost, while the stage was open."""
    multicast_packets: int = 0
    """Of those sent: one datagram for many ranks."""

    scatter_ended_by: Ending = "all"
    """What closed SCATTER of this rank's own shard."""
    gather_ended_by: Ending = "all"
    entered_s: tuple[float | None, ...] = ()
    """When each rank entered the op, as far as its packets told, after this rank's own entry (negative:
    before). This and the times below are None where unknown."""
    majority_entered_s: float | None = None
    """When the ⌈N/2⌉-th rank entered: the start of SCATTER."""
    scatter_last_s: tuple[float | None, ...] = ()
    """As owner: when the latest packet of each rank's contribution came."""
    gather_last_s: tuple[float | None, ...] = ()
    """As receiver: when the latest packet of each owner's mean came."""
    silent: tuple[int, ...] = ()
    """Ranks of which nothing has been heard for 3 ops: early exits do not wait for them."""
    sent_lost: tuple[float, ...] = ()
    """The share of the packets sent to each rank, in the time of this op, that was found lost."""
    received_lost: tuple[float, ...] = ()
    """The share of the packets from each rank, in the time of this op, that is missing between others."""
    lr_scale: LrScale | None = None
    """The factor of the learning rate that rank 0 has announced last, as far as this rank has heard."""
    late: tuple[LateCompletion, ...] = ()
    """Stages of earlier ops that have turned out complete since the last report."""
    verdicts: tuple[Verdict, ...] = ()
    """Who was late, and why (docs/time.md)."""
    members: Sequence[int] = ()
    """The ranks that the tuples are about: all, or in a grid those of this rank's row (docs/grid.md)."""
    column: tuple[Report, ...] = ()
    """In a grid: the ops of this rank's column that have ended since its last report. There, contributions
    are the sums of rows."""

    missing_from: tuple[int, ...] = field(init=False)
    """Ranks whose contribution to this rank's shard, or whose mean, is missing in part or whole."""

    def __post_init__(self) -> None:
        if not self.members:
            object.__setattr__(self, "members", range(len(self.scatter_lost)))
        silent = {rank for rank, share in zip(self.members, self.gather_lost, strict=False) if share > 0}
        owing = {
            rank
            for lost in (self.scatter_lost, self.gather_empty)
            for rank, share in zip(self.members, lost, strict=False)
            if share > 0 and rank not in self.abstained
        }
        object.__setattr__(self, "missing_from", tuple(sorted(silent | owing)))

    @property
    def size(self) -> int:
        """What decides how long an op takes."""
        return size_of(self.length, self.planes, self.gather_planes)

    @property
    def scatter_took_s(self) -> float | None:
        """SCATTER of this rank's own shard, from the entry of the majority; None if that is not known."""
        if self.majority_entered_s is None:
            return None
        return max(0.0, self.scatter_s - self.majority_entered_s)

    @property
    def gather_took_s(self) -> float:
        """GATHER, from the close of this rank's own shard, or from its entry if that was later."""
        return max(0.0, self.elapsed_s - max(0.0, self.scatter_s))

    def judged(self, verdicts: tuple[Verdict, ...]) -> Report:
        """This report with its verdicts."""
        report = object.__new__(Report)  # dataclasses.replace takes 15 µs for it, in every op
        vars(report).update(vars(self), verdicts=verdicts)
        return report

    def __str__(self) -> str:
        if self.status == "behind":
            return f"op {self.seq}: {self.behind_ops} ops behind, rejoined the group"
        text = f"op {self.seq}: {self.status} after {1e3 * self.elapsed_s:.2f} ms"
        text += f", {self.lost_frac:.2%} of the result lost, ε {self.epsilon}"
        return f"{text}, missing from ranks {list(self.missing_from)}" if self.missing_from else text


def size_of(length: int, planes: int, gather_planes: int) -> int:
    """An op's bytes, in coordinates of 16 planes; of raw, where planes are 0, its coordinates."""
    return length * ((planes or 16) + (gather_planes or 16)) // 32


_STAGES: tuple[Stage, Stage] = ("scatter", "gather")
_ENDINGS: dict[str, Ending] = {"ALL": "all", "GRACE": "grace", "BOUND": "bound", "DEADLINE": "deadline"}


def _from_native(
    native: _native.OpReport,
    members: Sequence[int],
    column: Sequence[int] = (),
    rows: int = 1,
    key: Hashable = None,
) -> Report:
    elapsed_s = (native.finished_at - native.entered_at) / 1e9
    if native.behind_ops:
        return Report(
            seq=native.seq,
            status="behind",
            length=native.bucket_len,
            elapsed_s=elapsed_s,
            behind_ops=native.behind_ops,
            key=key,
            contributed=False,
            lost_frac=1.0,
        )

    def shares(coordinates: list[int], lengths: list[int]) -> tuple[float, ...]:
        return tuple(c / n if n else 0.0 for c, n in zip(coordinates, lengths, strict=True))

    entered_at = native.entered_at

    def since_entry(times: Sequence[int]) -> tuple[float | None, ...]:
        return tuple(None if at < 0 else (at - entered_at) / 1e9 for at in times)

    silent, abstained = native.silent, native.abstained
    gone = {place for place, quiet in enumerate(silent) if quiet}.union(abstained)
    live = max(1, len(members) - len(gone))
    quality = quality_of(native.energies, ranks=len(members), live=live, rows=rows)
    majority_at = native.majority_entered_at
    lengths = native.shard_lengths
    lost = sum(native.gather_missing) + sum(native.gather_empty)
    return Report(
        seq=native.seq,
        status="complete" if native.status.name == "COMPLETE" else "deadline",
        length=native.bucket_len,
        elapsed_s=elapsed_s,
        key=key,
        contributed=native.contributed,
        non_finite=native.non_finite,
        scatter_lost=shares(native.scatter_missing, [lengths[native.place]] * len(lengths)),
        abstained=tuple([members[peer] for peer in abstained]),
        gather_lost=shares(native.gather_missing, lengths),
        gather_empty=shares(native.gather_empty, lengths),
        lost_frac=lost / native.bucket_len if native.bucket_len else 0.0,
        epsilon=quality.epsilon,
        correlation=quality.correlation,
        planes=native.planes,
        gather_planes=native.gather_planes,
        scatter_s=(native.scatter_closed_at - entered_at) / 1e9,
        sent_bytes=native.sent_bytes,
        received_bytes=native.received_bytes,
        sent_packets=native.sent_packets,
        received_packets=native.received_packets,
        trimmed_packets=native.trimmed_packets,
        resent_packets=native.resent_packets,
        multicast_packets=native.multicast_packets,
        scatter_ended_by=_ENDINGS[native.scatter_ended_by.name],
        gather_ended_by=_ENDINGS[native.gather_ended_by.name],
        entered_s=since_entry(native.peer_entered_at),
        majority_entered_s=None if majority_at < 0 else (majority_at - entered_at) / 1e9,
        scatter_last_s=since_entry(native.scatter_last_at),
        gather_last_s=since_entry(native.gather_last_at),
        silent=tuple([members[place] for place, quiet in enumerate(silent) if quiet]),
        sent_lost=shares(native.sent_lost_packets, native.sent_to_packets),
        received_lost=shares(
            native.received_lost_packets,
            [a + b for a, b in zip(native.received_lost_packets, native.received_from_packets, strict=True)],
        ),
        lr_scale=_announced(native),
        late=tuple(
            LateCompletion(late.seq, _STAGES[late.stage], late.bucket_len, late.took_ns / 1e9)
            for late in native.late
        ),
        members=members,
        column=tuple(
            _from_native(report, column)
            for report in native.column
            if report.status in (_native.Status.COMPLETE, _native.Status.DEADLINE)
        ),
    )


def _announced(native: _native.OpReport) -> LrScale | None:
    if native.lr_scale <= 0:
        return None
    return LrScale(round(native.lr_scale, LR_DIGITS), native.lr_period)


def outcome_of(
    native: _native.OpReport, grid: GridLayout, rank: int, key: Hashable = None, failure: str = ""
) -> Report | TailcutError:
    """The report, or the error that ``wait()`` raises. ``failure``: what the lane says of its engine."""
    status = native.status
    if status == _native.Status.LENGTH_MISMATCH:
        stated = zip(grid.row(rank), native.peer_lengths, native.peer_voted, strict=True)
        lengths = [f"rank {r}: {length}" for r, length, voted in stated if voted]
        return ConfigError(
            f"op {native.seq}: this rank (rank {rank}) passed {native.bucket_len} coordinates and the group "
            f"does not agree ({', '.join(lengths)}); every rank must pass the same length in the same order"
        )
    if status == _native.Status.CLOSED:
        return ClosedError(f"op {native.seq}: the group was closed before the op ended")
    if status == _native.Status.FAILED:
        return engine_failed(failure)
    if status == _native.Status.SEQ_EXHAUSTED:
        return ConfigError("this group has done 2**32 - 1 ops, which is all it can number; open a new one")
    return _from_native(native, grid.row(rank), grid.column(rank), grid.rows, key)


def engine_failed(failure: str) -> ClosedError:
    return ClosedError(f"the group is closed because its engine failed: {failure}")
