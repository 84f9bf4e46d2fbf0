"""Plays the ops of one rank again: values are computed as ever, and the script says what came when.

Owns the order of an op's steps and the check of its result. A variant of an engine: no clock, no sockets.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tailcut import _native
from tailcut.codec import CODEC_IDS
from tailcut.errors import ReplayError
from tailcut.ledger.records import OpRecord
from tailcut.replay.exchange import Exchange
from tailcut.replay.owner import Owner, begin_op
from tailcut.replay.script import Script, in_time, shard_of

Array = npt.NDArray[np.float32]

SPARE_OPS = 64
"""Late parts are kept for so many ops longer than they were, so that none is missing for its age."""


class Player:
    """One rank. Ops are begun in order, and ended in order, by one thread or two. Other threads may wait for
    copies of other ranks' state."""

    def __init__(self, script: Script, rank: int, exchange: Exchange) -> None:
        self._script = script
        self._own = script.ranks[rank]
        self.rank = rank
        self.ranks = int(self._own.ledger.start.about["ranks"])
        self._epochs = self._known_epochs()
        self.core = self._core_with(self._epochs)
        self._lock = threading.Lock()
        self._owner = Owner(self.core, script, rank, exchange, self._lock)
        self._deliveries = self._owner.deliveries

    def _core_with(self, epochs: Sequence[_native.Epoch]) -> _native.ReplayCore:
        about, config = self._own.ledger.start.about, self._script.about["config"]
        window_ops = int(config["window_ops"])
        core = _native.ReplayCore(
            rank=self.rank,
            ranks=self.ranks,
            seed=int(config["seed"]),
            codec=CODEC_IDS[about["codec"]],
            limits=list(zip(about["packet_bytes"], about["trim_payload_bytes"], strict=True)),
            carry=config["late"] == "carry",
            late_ops=max(min(window_ops, 64), window_ops // 16) + SPARE_OPS,
        )
        for epoch in epochs:
            core.install(epoch)
        return core

    def _known_epochs(self) -> list[_native.Epoch]:
        """All that any rank knew of: each holds from its first op on, unless this rank had ended that before
        it knew."""
        known = []
        epochs: dict[int, dict[str, Any]] = {}
        for script in self._script.ranks.values():
            for note in script.ledger.notes:
                if note.event == "epoch":
                    epochs[note.values["number"]] = dict(note.values)
        for number, epoch in sorted(epochs.items()):
            agreed: int = epoch["first_seqs"][0]
            ended = [op.seq for op in self._own.ops if op.report.epoch < number and not op.voided]
            first_seq = max([agreed, *(seq + 1 for seq in ended)])
            known.append(_native.Epoch(number, first_seq, epoch["weights"], epoch["members"]))
        return known

    def serve_rest(self) -> None:
        """This rank begins no more ops: close what others took of those that it has not ended."""
        with self._lock:
            self._owner.serve_rest()

    def give_copy(self, name: str, peer: int, blob: bytes) -> None:
        """Of the training state of this rank, for one other."""
        self._deliveries.give_copy(name, peer, blob)

    def copy(self, name: str, source: int) -> bytes:
        """What another rank has given."""
        with self._lock:
            return self._deliveries.copy(name, source)

    def leave(self, reason: str) -> None:
        """This rank plays no more; the others are told why."""
        self._deliveries.leave(reason)

    def skipped(self, first_seq: int, last_seq: int) -> None:
        """Nobody has applied these ops."""
        with self._lock:
            for seq in range(first_seq, last_seq + 1):
                self._owner.note_skipped(seq)
            self.core.skipped(first_seq, last_seq + 1)

    def resynced(self) -> None:
        """All replicas were made equal."""
        with self._lock:
            self.core.resynced()

    # ---- the entry

    def begin(self, seq: int, bucket: Array, tag: int, residue: Array | None = None) -> OpRecord | None:
        """The rank enters an op. Its contribution goes to all who have used some of it. None: its end is not
        on record, because the rank died before."""
        record = self._own.by_seq.get(seq)
        if record is None:
            return None
        self._check(record, bucket.size)
        with self._lock:
            if record.voided:
                self._enter_in_vain(record, bucket, tag, residue)
            else:
                self._enter(record, bucket, tag, residue)
        return None if seq in self._own.unended else record

    def _enter(self, record: OpRecord, bucket: Array, tag: int, residue: Array | None) -> None:
        seq = record.seq
        self._owner.begin(seq, record, int(record.terms["key"]), tag)
        self._owner.close_early(record)
        self._owner.take_handed_over(record)
        self.core.enter(seq, bucket, record.contributed, residue)
        self._owner.note_entry(record)
        self._contribute(self.core, seq)

    def _enter_in_vain(self, record: OpRecord, bucket: Array, tag: int, residue: Array | None) -> None:
        """The op was given up here because its epoch was replaced. Others may have used the contribution
        before they knew of that, so it is made for the epoch in which they did."""
        core = self._core_with([epoch for epoch in self._epochs if epoch.number <= record.report.epoch])
        begin_op(core, record.seq, record, int(record.terms["key"]), tag)
        core.enter(record.seq, bucket, record.contributed, residue)
        self._contribute(core, record.seq)
        if residue is not None and record.contributed:
            residue.fill(0)  # nobody applies the op

    def _contribute(self, core: _native.ReplayCore, seq: int) -> None:
        """Give what this rank has entered an op with to all who used some of it."""
        for peer in self._others():
            if self._deliveries.wants_contribution(seq, peer):
                self._deliveries.give_contribution(seq, peer, core.contribution(seq, peer))

    def _check(self, record: OpRecord, length: int) -> None:
        if record.report.length != length:
            raise ReplayError(
                f"op {record.seq}: rank {self.rank} passed {length} coordinates, and {record.report.length} "
                "are on record; the model or its buckets are others than those that were recorded"
            )

    # ---- the end

    def end(self, record: OpRecord, bucket: Array) -> None:
        """Take the op to its end; the bucket then has the result of the record."""
        if record.voided:
            bucket.fill(0)
            return
        with self._lock:
            self._end(record, bucket)

    def _end(self, record: OpRecord, bucket: Array) -> None:
        seq, fates = record.seq, record.fates
        self._owner.close(record)
        if record.report.status == "behind":  # the rank fell too far behind in it
            self.core.drop(seq)
            bucket.fill(0)
            return
        for owner in self._others():
            shard = shard_of(record, owner)
            runs, cuts = in_time(record, shard)
            if runs:
                self.core.place(seq, self._deliveries.mean(seq, owner, runs), runs, cuts)
            if fates.empty[shard]:
                self.core.place_empty(seq, shard, fates.empty[shard])
        self._take_late_means(record)
        shares = [fates.stand_in if shard in fates.stood_in else 0.0 for shard in range(self.ranks)]
        found = self.core.end(seq, record.report.status == "complete", shares)
        self.check_result(record, found)
        self._deliveries.forget_what_is_over(seq)

    def check_result(self, record: OpRecord, found: int) -> None:
        """``found`` is the hash of the result in the own shard."""
        if found != record.fates.mean_hash:
            raise ReplayError(self._divergence(record, found))

    def _take_late_means(self, record: OpRecord) -> None:
        for parts in self._own.late.get(record.seq, []):
            if parts.stage == "gather":
                owner = self._own.by_seq[parts.seq].owner(parts.source)
                mean = self._deliveries.mean(parts.seq, owner, parts.runs)
                self.core.take_late_means(mean, parts.runs)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def _divergence(self, record: OpRecord, found: int) -> str:
        return (
            f"the replay parts from the record at op {record.seq} (bucket {record.key}), found by rank "
            f"{self.rank}: the mean of its shard has the hash {found:016x}, and on record is "
            f"{record.fates.mean_hash:016x}. Up to here all was alike, so the gradients of this op differ "
            "(other data order or seeds, another version of a library, other hardware), or a fate of it in "
            "the ledger was changed"
        )
