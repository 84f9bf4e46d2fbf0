"""What an op cost: frozen values that are made once, when the op ends."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Literal, cast

from tailcut import _native
from tailcut.epsilon import NO_ERROR, Epsilon, quality_of
from tailcut.errors import ClosedError, ConfigError, TailcutError
from tailcut.grid import GridLayout
from tailcut.mirror import (
    NO_STAGE,
    NO_TRAFFIC,
    Ending,
    LateCompletion,
    Link,
    LrScale,
    StageReport,
    Traffic,
    plain,
)

Status = Literal["complete", "partial", "behind"]

LR_DIGITS = 3
"""Digits of a factor of the learning rate, which travels as fp32 and must be the same number everywhere."""


class Verdict(str, Enum):
    """How this rank judges another one in an op (docs/time.md)."""

    ON_TIME = "on time"
    COMPUTE_LATE = "compute-late"
    """It entered late."""
    NETWORK_LATE = "network-late"
    """It entered on time, but its packets came late or were still coming when the stage ended."""
    LOSSY_FROM = "lossy link from it"
    LOSSY_TO = "lossy link to it"
    SILENT = "silent"
    """Nothing came from it: dead, frozen or cut off."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Report:
    """One op as this rank saw it."""

    seq: int
    status: Status
    """complete: all means came. partial: the op ended before that; ``ended_by`` says why, and ``lost_frac``
    how much did not come. behind: see ``behind_ops``."""
    length: int
    """Coordinates of the bucket."""
    elapsed_s: float
    behind_ops: int = 0
    """Above 0: this rank was that many ops behind, which is more than the window. Nothing was reduced, the
    bucket is zero, the rank's seq is now the group's, and it contributes nothing until
    ``Group.resynced()``."""
    key: Hashable = None
    """The bucket's key, as passed to ``allreduce``."""
    contributed: bool = True
    epoch: int = 0
    """The number of the agreement on the owners that the op went by (docs/epochs.md)."""
    heard_epoch: int = 0
    """The latest number that any rank has spoken of."""
    non_finite: bool = False
    """Some rank's bucket held an Inf or a NaN. So does the result, on every rank that learned of it."""
    lost_frac: float = 0.0
    """The share of the result whose mean did not come in time or was EMPTY. It is zero there, or, with a key
    and ``late="carry"``, stands for what follows with the next op of the key."""
    epsilon: Epsilon = NO_ERROR
    """The error that this op added to the mean, by source, as far as this rank knows (docs/budget.md)."""
    correlation: float = 0.0
    """The average correlation between the contributions of two ranks: 0 is independent, 1 is all alike."""
    verdicts: tuple[Verdict, ...] = ()
    """Who was late and why (docs/time.md), in the order of ``members``, like ``links``."""

    scatter: StageReport = NO_STAGE
    """This rank as owner: contributions to its shard."""
    gather: StageReport = NO_STAGE
    """This rank as receiver: the means of all shards."""
    links: tuple[Link, ...] = ()
    """What this rank saw of every member, by rank; in a grid, by place in ``members`` (see ``link``)."""
    members: Sequence[int] = ()
    """The ranks of the links: all of them, or in a grid those of this rank's row (docs/grid.md)."""
    traffic: Traffic = NO_TRAFFIC
    late: tuple[LateCompletion, ...] = ()
    """Stages of earlier ops that have turned out complete since the last report."""
    carried_coords: int = 0
    """Coordinates of this result to which a mean was added that had come too late for an earlier op
    (docs/late.md)."""
    late_coords: int = 0
    """Coordinates of the previous op whose means came after its end and before the end of this one."""
    split_verdicts: int = 0
    """Earlier ops that others skipped for an Inf or a NaN, and whose results this rank had applied when it
    learned of that, since the last report."""
    lr_scale: LrScale | None = None
    """The factor of the learning rate that rank 0 announced last, as far as this rank has heard."""
    column: tuple[Report, ...] = ()
    """In a grid: the ops of this rank's column that have ended since its last report. Their contributions are
    the sums of rows."""

    def __post_init__(self) -> None:
        if not self.members:
            object.__setattr__(self, "members", range(len(self.links)))

    @property
    def ended_by(self) -> Ending:
        """What ended the op; the op ends with GATHER."""
        return self.gather.ended_by

    @cached_property
    def missing_from(self) -> tuple[int, ...]:
        """Ranks whose contribution to this rank's shard, or whose mean, is missing in part or as a whole."""
        return tuple(
            rank
            for rank, link in zip(self.members, self.links, strict=False)
            if link.gather.missing or ((link.scatter.missing or link.gather.empty) and not link.abstained)
        )

    @property
    def size(self) -> int:
        """The size that decides how long an op takes."""
        return size_of(self.length, self.scatter.planes, self.gather.planes)

    def link(self, rank: int) -> Link:
        """The link to a rank of the group, which must be one of the members."""
        return self.links[self.members.index(rank)]

    def judged(self, verdicts: tuple[Verdict, ...]) -> Report:
        """This report with its verdicts."""
        report = object.__new__(Report)  # dataclasses.replace would take 15 µs, in every op
        vars(report).update(vars(self), verdicts=verdicts)
        return report

    def to_dict(self) -> dict[str, Any]:
        """Every field by its name, as values that JSON has. A key that JSON does not have becomes a
        string."""
        values = {name: plain(getattr(self, name)) for name in self.__dataclass_fields__}
        return {**values, "ended_by": self.ended_by, "missing_from": list(self.missing_from)}

    def __str__(self) -> str:
        if self.status == "behind":
            return f"op {self.seq}: {self.behind_ops} ops behind, rejoined the group"
        text = f"op {self.seq}: {self.status} after {1e3 * self.elapsed_s:.2f} ms"
        text += f", {self.lost_frac:.2%} of the result lost, ε {self.epsilon}"
        return f"{text}, missing from ranks {list(self.missing_from)}" if self.missing_from else text


def size_of(length: int, planes: int, gather_planes: int) -> int:
    """An op's bytes, counted in coordinates of 16 planes. With raw, where planes are 0, its coordinates."""
    return length * ((planes or 16) + (gather_planes or 16)) // 32


def _from_native(
    native: _native.OpReport,
    members: Sequence[int],
    column: Sequence[int] = (),
    rows: int = 1,
    key: Hashable = None,
) -> Report:
    elapsed_s = (native.ended_at - native.entered_at) / 1e9
    if native.status == "behind":
        return Report(
            seq=native.seq,
            status="behind",
            length=native.bucket_len,
            elapsed_s=elapsed_s,
            behind_ops=native.behind_ops,
            key=key,
            contributed=False,
            lost_frac=1.0,
            gather=_JUMPED,
        )
    links, gather, length = native.links, native.gather, native.bucket_len
    live = len([link for link in links if not (link.silent or link.abstained)])
    quality = quality_of(
        native.energies,
        ranks=len(members),
        live=max(1, live),
        rows=rows,
        carried=native.carried,
        gone_frac=_gone_frac(links, native.place) if native.carried else 0.0,
        coding_carried=native.coding_carried,
    )
    return Report(
        seq=native.seq,
        status=cast(Status, native.status),
        length=length,
        elapsed_s=elapsed_s,
        key=key,
        contributed=native.contributed,
        epoch=native.epoch,
        heard_epoch=native.heard_epoch,
        non_finite=native.non_finite,
        lost_frac=(gather.missing + gather.empty) / length if length else 0.0,
        epsilon=quality.epsilon,
        correlation=quality.correlation,
        scatter=native.scatter,
        gather=gather,
        links=links,
        members=members,
        traffic=native.traffic,
        late=native.late,
        carried_coords=native.carried_coords,
        late_coords=native.late_coords,
        split_verdicts=native.split_verdicts,
        lr_scale=_announced(native.lr_scale),
        column=tuple([_from_native(op, column) for op in native.column if op.status in _RESULTS]),
    )


def hears_nobody(links: Sequence[Link], own: int) -> bool:
    """Whether none of several others is heard, though they have not left. It is the port of this rank that is
    closed then: they are there, and what they send comes when it opens."""
    others = [link for rank, link in enumerate(links) if rank != own]
    return len(others) > 1 and all(link.silent for link in others if not link.left)


def _gone_frac(links: Sequence[Link], own: int) -> float:
    """Of the means that did not come from others, the share whose owner is silent or has left."""
    deaf = hears_nobody(links, own)
    others = [link for rank, link in enumerate(links) if rank != own]
    missing = sum(link.gather.missing + link.gather.empty for link in others)
    gone = sum(
        link.gather.missing + link.gather.empty for link in others if link.left or (link.silent and not deaf)
    )
    return gone / missing if missing else 0.0


_RESULTS = ("complete", "partial")
_JUMPED = StageReport(ended_by="deadline")


def _announced(heard: LrScale) -> LrScale | None:
    return heard._replace(scale=round(heard.scale, LR_DIGITS)) if heard.scale > 0 else None


def outcome_of(
    native: _native.OpReport, grid: GridLayout, rank: int, key: Hashable = None, failure: str = ""
) -> Report | TailcutError:
    """The report, or the error that ``wait()`` raises. ``failure`` is what the lane says of its engine."""
    status = native.status
    if status in _RESULTS or status == "behind":
        return _from_native(native, grid.row(rank), grid.column(rank), grid.rows, key)
    if status == "length_mismatch":
        stated = zip(grid.row(rank), native.stated_lengths, strict=True)
        lengths = [f"rank {r}: {length}" for r, length in stated if length is not None]
        return ConfigError(
            f"op {native.seq}: this rank (rank {rank}) passed {native.bucket_len} coordinates and the group "
            f"does not agree ({', '.join(lengths)}); every rank must pass the same length in the same order"
        )
    if status == "closed":
        return ClosedError(f"op {native.seq}: the group was closed before the op ended")
    if status == "failed":
        return engine_failed(failure)
    assert status == "seq_exhausted", status
    return ConfigError("this group has done 2**32 - 1 ops, which is all it can number; open a new one")


def engine_failed(failure: str) -> ClosedError:
    return ClosedError(f"the group is closed because its engine failed: {failure}")
