"""What an op cost: frozen values, made once when the op ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tailcut import _native
from tailcut.errors import ClosedError, ConfigError, TailcutError

Status = Literal["complete", "deadline", "behind"]


@dataclass(frozen=True)
class Report:
    """One op as this rank saw it. Fractions are of coordinates; tuples are indexed by rank."""

    seq: int
    status: Status
    """complete: all was answered; deadline: what did not come is zero; behind: see behind_ops."""
    length: int
    elapsed_s: float
    behind_ops: int = 0
    """Above 0: this rank was that many ops behind, more than the window; nothing was reduced, the bucket is
    zero, the rank's seq is now the group's, and it contributes nothing until ``Group.resynced()``."""
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

    planes: int = 0
    """Bits a coordinate that this rank sent; 0: raw, 32-bit floating point."""
    scatter_s: float = 0.0
    """From the entry until this rank closed its own shard; negative if that was done before it entered."""
    sent_bytes: int = 0
    """Until the op ended here; means that peers fetch later are in ``Group.stats()`` only."""
    received_bytes: int = 0
    sent_packets: int = 0
    received_packets: int = 0
    trimmed_packets: int = 0

    missing_from: tuple[int, ...] = field(init=False)
    """Ranks whose contribution to this rank's shard, or whose mean, is missing in part or whole."""

    def __post_init__(self) -> None:
        silent = {rank for rank, share in enumerate(self.gather_lost) if share > 0}
        owing = {
            rank
            for lost in (self.scatter_lost, self.gather_empty)
            for rank, share in enumerate(lost)
            if share > 0 and rank not in self.abstained
        }
        object.__setattr__(self, "missing_from", tuple(sorted(silent | owing)))

    def __str__(self) -> str:
        if self.status == "behind":
            return f"op {self.seq}: {self.behind_ops} ops behind, rejoined the group"
        text = f"op {self.seq}: {self.status} after {1e3 * self.elapsed_s:.2f} ms"
        text += f", {self.lost_frac:.2%} of the result lost"
        return f"{text}, missing from ranks {list(self.missing_from)}" if self.missing_from else text


def _from_native(native: _native.OpReport, rank: int) -> Report:
    elapsed_s = (native.finished_at - native.entered_at) / 1e9
    if native.behind_ops:
        return Report(
            seq=native.seq,
            status="behind",
            length=native.bucket_len,
            elapsed_s=elapsed_s,
            behind_ops=native.behind_ops,
            contributed=False,
            lost_frac=1.0,
        )

    def shares(coordinates: list[int], lengths: list[int]) -> tuple[float, ...]:
        return tuple(c / n if n else 0.0 for c, n in zip(coordinates, lengths, strict=True))

    lengths = native.shard_lengths
    lost = sum(native.gather_missing) + sum(native.gather_empty)
    return Report(
        seq=native.seq,
        status="complete" if native.status.name == "COMPLETE" else "deadline",
        length=native.bucket_len,
        elapsed_s=elapsed_s,
        contributed=native.contributed,
        non_finite=native.non_finite,
        scatter_lost=shares(native.scatter_missing, [lengths[rank]] * len(lengths)),
        abstained=tuple(native.abstained),
        gather_lost=shares(native.gather_missing, lengths),
        gather_empty=shares(native.gather_empty, lengths),
        lost_frac=lost / native.bucket_len if native.bucket_len else 0.0,
        planes=native.planes,
        scatter_s=(native.scatter_closed_at - native.entered_at) / 1e9,
        sent_bytes=native.sent_bytes,
        received_bytes=native.received_bytes,
        sent_packets=native.sent_packets,
        received_packets=native.received_packets,
        trimmed_packets=native.trimmed_packets,
    )


def outcome_of(native: _native.OpReport, rank: int) -> Report | TailcutError:
    """The report, or the error that ``wait()`` raises."""
    status = native.status
    if status == _native.Status.LENGTH_MISMATCH:
        stated = zip(native.peer_lengths, native.peer_voted, strict=True)
        lengths = [f"rank {r}: {length}" for r, (length, voted) in enumerate(stated) if voted]
        return ConfigError(
            f"op {native.seq}: this rank (rank {rank}) passed {native.bucket_len} coordinates and the group "
            f"does not agree ({', '.join(lengths)}); every rank must pass the same length in the same order"
        )
    if status == _native.Status.CLOSED:
        return ClosedError(f"op {native.seq}: the group was closed before the op ended")
    if status == _native.Status.OUT_OF_MEMORY:
        return ClosedError(
            "the group is closed because its engine ran out of memory; lower pool_bytes or the buckets"
        )
    if status == _native.Status.SEQ_EXHAUSTED:
        return ConfigError("this group has done 2**32 - 1 ops, which is all it can number; open a new one")
    return _from_native(native, rank)
