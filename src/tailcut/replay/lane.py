"""A lane that plays a ledger: the record says what came, where other lanes have a socket and a clock.

It has the methods of ``_native.UdpLane`` that a group uses. Reports are those of the record.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tailcut import _native
from tailcut.errors import ReplayError
from tailcut.ledger.records import OpRecord
from tailcut.mirror import NO_TRAFFIC
from tailcut.replay.player import Array, Player
from tailcut.replay.script import RankScript
from tailcut.replay.single import Dump


@dataclass(frozen=True)
class _Flight:
    seq: int
    record: OpRecord | None
    """None: the rank has not ended this op."""
    bucket: Array


class ReplayLane:
    """One rank. One thread at a time may wait."""

    failure = ""

    def __init__(self, player: Player, script: RankScript) -> None:
        self._player = player
        self._script = script
        self._next_seq = script.ops[0].seq if script.ops else 0
        self._refusals = deque(script.refusals)
        self._submitted = threading.Condition()  # when the next op is another one
        self._tickets = 0
        self._flying: dict[int, _Flight] = {}  # by ticket, in the order of submission
        self._ended: dict[int, Any] = {}  # reports

    def submit(
        self,
        bucket: Array,
        terms: object,
        key: int = 0,
        loss_scale_tag: int = 0,
        *,
        reliable: Sequence[tuple[int, int]] = (),
        contribute: bool = True,
        seq: int | None = None,
        residue: Array | None = None,
    ) -> int:
        """Enter the next op. Its terms are those of the record."""
        seq = self._next_seq if seq is None else seq
        self._tickets += 1
        if self._was_refused(seq):
            self._ended[self._tickets] = self._refusal()
            return self._tickets
        with self._telling_the_others():
            self.note_input(seq, bucket, residue)
            record = self._player.begin(seq, bucket, loss_scale_tag, residue)
        self._flying[self._tickets] = _Flight(seq, record, bucket)
        with self._submitted:
            self._next_seq = seq + 1
            self._submitted.notify_all()
        return self._tickets

    def note_input(self, seq: int, bucket: Array, residue: Array | None) -> None:
        """The rank is about to enter an op with this bucket, and with what coding took from the last one."""

    def _was_refused(self, seq: int) -> bool:
        """The rank was too far behind for it. It may have asked once more or once less before it heard so."""
        record = self._script.by_seq.get(seq)
        if not self._script.refusals or (record is not None and record.entered):
            return False
        return bool(self._refusals) or any(op.seq > seq for op in self._script.ops)

    def _refusal(self) -> Any:
        refusals = self._refusals
        return (refusals.popleft() if refusals else self._script.refusals[-1]).native

    def wait(self, ticket: int, timeout_ns: int) -> Any:
        """End all ops up to this one. It takes as long as the other ranks take, whatever the timeout; None if
        this rank has to enter others before."""
        with self._telling_the_others():
            while ticket not in self._ended:
                number, flight = next(iter(self._flying.items()))
                if flight.record is None:
                    self._player.serve_rest()
                    raise ReplayError(
                        f"the ledger of rank {self._script.rank} ends before the end of op {flight.seq}: it "
                        "died there, and its replay ends there too"
                    )
                if not self._came_to(flight.record, timeout_ns):
                    return None
                self._end(flight.record, flight.bucket)
                del self._flying[number]
                self._ended[number] = flight.record.native
        return self._ended[ticket]

    def _came_to(self, record: OpRecord, timeout_ns: int) -> bool:
        """Who hears that an op was too far behind enters no more. So it hears of it after it has entered what
        it did before."""
        if record.report.status != "behind":
            return True
        before = [op.seq for op in self._script.ops if record.entered_s <= op.entered_s <= record.ended_s]
        with self._submitted:
            return self._submitted.wait_for(lambda: self._next_seq > max(before), timeout_ns / 1e9)

    def _end(self, record: OpRecord, bucket: Array) -> None:
        self._player.end(record, bucket)

    @contextmanager
    def _telling_the_others(self) -> Iterator[None]:
        """They do not wait for a rank that has failed."""
        try:
            yield
        except BaseException as error:
            self._player.leave(str(error) or type(error).__name__)
            raise

    def drop_report(self, ticket: int) -> None:
        self._ended.pop(ticket, None)

    @property
    def behind_ops(self) -> int:
        """As many as it takes to skip the steps that were skipped then: their ops did not contribute."""
        ops, seq = 0, self._next_seq
        if self._was_refused(seq) and self._refusals and not self._refusals[0].terms["contribute"]:
            return self._refusals[0].report.behind_ops
        while (record := self._script.by_seq.get(seq + ops)) and not record.terms["contribute"]:
            ops += 1
        return ops + 1 if ops else 0

    @property
    def heard_epoch(self) -> int:
        """The record says in which epoch an op was."""
        return 0

    def skipped(self, first_seq: int, last_seq: int) -> None:
        self._player.skipped(first_seq, last_seq)

    def forget(self, key: int, first: int, count: int) -> None:
        """The record says what was taken in late, and what was not."""

    def resynced(self) -> None:
        self._player.resynced()

    def set_away(self, away: bool) -> None:
        """The record says who was not waited for."""

    def skip_to(self, seq: int) -> None:
        self._next_seq = seq

    def rejoined(self) -> None:
        """The record says which ops this rank contributes to."""

    def stats(self) -> Any:
        """Nothing was sent."""
        protocol: dict[str, Any] = dict.fromkeys(_native.Counters.fields(), 0)
        return SimpleNamespace(
            protocol=SimpleNamespace(**{**protocol, "traffic": NO_TRAFFIC, "rejected": {}}),
            socket=SimpleNamespace(blocked_sends=0, failed_sends=0),
            uncorrected_packets=0,
            pool_used_bytes=0,
            memory_bytes=0,
            rtt_ns=[0] * self._script.ledger.start.ranks,
            contributing=True,
        )

    # ---- blobs of other ranks, of which none come

    def offer(self, blob_id: int, blob: Any) -> None:
        pass

    def withdraw(self, blob_id: int) -> None:
        pass

    def fetch(self, server: int, blob_id: int, most_bytes: int) -> int:
        return 0

    def cancel(self, ticket: int) -> None:
        pass

    def take_fetched(self, ticket: int, timeout_ns: int) -> tuple[int, Any]:
        return 0, np.empty(0, np.uint8)

    def take_wanted(self) -> dict[int, int]:
        return {}

    # ---- the end

    def close(self, linger_ns: int) -> None:
        with suppress(ReplayError):  # another one has failed, and says so
            self._player.serve_rest()
        self._player.leave("it has closed its group")

    def join(self, timeout_ns: int) -> bool:
        return True

    def abandon(self) -> None:
        pass


class DumpingLane(ReplayLane):
    """Ends with one op, and stores what its result follows from."""

    def __init__(self, player: Player, script: RankScript, dump: Dump) -> None:
        super().__init__(player, script)
        self._dump = dump

    def note_input(self, seq: int, bucket: Array, residue: Array | None) -> None:
        self._dump.note_input(seq, bucket, residue)

    def _end(self, record: OpRecord, bucket: Array) -> None:
        super()._end(record, bucket)
        if record.seq == self._dump.seq:
            self._dump.write(bucket)
            raise ReplayError(f"op {record.seq} is stored, and the replay ends with it")
