"""What one rank of a replay does as an owner: it closes its shard in the parts in which it did then.

Owns which parts have closed. As an engine does, it serves ops that its own rank has not entered yet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from tailcut import _native
from tailcut.errors import ReplayError
from tailcut.ledger.records import OpRecord
from tailcut.replay.deliveries import Deliveries
from tailcut.replay.exchange import Exchange
from tailcut.replay.granules import overlap
from tailcut.replay.late import LateParts
from tailcut.replay.script import Closing, Script, on_time


def begin_op(core: _native.ReplayCore, seq: int, alike: OpRecord, key: int, tag: int) -> None:
    """Make an op known to a core; ``alike`` has its terms."""
    terms = alike.terms
    scatter, gather = (
        (int(coding["planes"]), bool(coding["whole"])) for coding in (terms["scatter"], terms["gather"])
    )
    core.begin(seq, alike.report.length, key, scatter, gather, tag)


class Owner:
    """The shards of one rank."""

    def __init__(
        self,
        core: _native.ReplayCore,
        script: Script,
        rank: int,
        exchange: Exchange,
        lock: threading.Lock,
    ) -> None:
        self._core = core
        self._own = script.ranks[rank]
        self._rank = rank
        self._others = [other for other in script.ranks if other != rank]
        self.deliveries = Deliveries(script, rank, exchange, lock, self.serve)
        self._begun: set[int] = set()  # ops that the core knows
        self._entered = -1  # the latest op that the rank has entered
        self._skipped: set[int] = set()  # ops that nobody has applied, as far as the rank knows
        played = [op for _, op in sorted(self._own.by_seq.items())]
        self._to_close = {op.seq: list(self._own.closings(op.seq)) for op in played}
        self._in_flight: dict[int, OpRecord] = {}  # the rank has entered, and some is to close
        self._ahead = [op for op in played if self._closes_early(op)]

    def begin(self, seq: int, alike: OpRecord, key: int, tag: int) -> None:
        """Make an op known to the core, with the late parts that it takes in."""
        if seq in self._begun:
            return
        self._begun.add(seq)
        begin_op(self._core, seq, alike, key, tag)
        for parts in self._own.late.get(seq, []):
            if parts.stage == "scatter":
                self._core.admit(seq, parts.seq, parts.source, parts.subtracted, parts.runs)

    def note_entry(self, record: OpRecord) -> None:
        """The own contribution to this op is there."""
        self._entered = record.seq
        self._in_flight[record.seq] = record

    # ---- closing

    def close_early(self, record: OpRecord) -> None:
        """What had closed before the rank entered closes now."""
        while (closings := self._to_close[record.seq]) and closings[0].early:
            self._close(record, closings[0])

    def close(self, record: OpRecord) -> None:
        """The rank has entered, and all of its shard closes: the op ends."""
        while closings := self._to_close[record.seq]:
            self._close(record, closings[0])
        del self._in_flight[record.seq]
        self._core.close(record.seq)

    def serve(self) -> bool:
        """Close a part of an op, which the rank may have entered or not, if all that it needs has come."""
        self._ahead = [record for record in self._ahead if self._closes_early(record)]
        for record in (*self._in_flight.values(), *self._ahead):
            closings = self._to_close[record.seq]
            if closings and self._can_close(record, closings[0]):
                self._close(record, closings[0])
                return True
        return False

    def serve_rest(self) -> None:
        """This rank does no more steps: close what others took of it, in ops that it has not ended."""
        for seq, record in sorted(self._own.unended.items()):
            while (closings := self._to_close[seq]) and self._is_of_use(record):
                if not closings[0].early and seq not in self._in_flight:
                    return  # the replay has come to its end before the run did
                self._close(record, closings[0])

    def _is_of_use(self, record: OpRecord) -> bool:
        """Whether anybody used something of an op, or it was late for it."""
        wanted = (
            self.deliveries.wants_mean(record.seq, peer, closing)
            for peer in self._others
            for closing in self._to_close[record.seq]
        )
        return any(wanted) or record.seq in self._own.late_for

    def note_skipped(self, seq: int) -> None:
        """Nobody has applied this op. What took late parts of it in had closed before that was known."""
        for record in self._ahead:
            if seq in self._own.skips.first_uses.get(record.seq, ()):
                self.close_early(record)
        self._skipped.add(seq)

    def _close(self, record: OpRecord, closing: Closing) -> None:
        late = list(self._late(record, closing))
        for parts in late:
            self.close_early(self._was(parts))
        in_time = {peer: overlap(on_time(record, peer)[0], closing.runs) for peer in self._others}
        for seq, source in self._needed(record, closing, late):
            if source != self._rank:
                self.deliveries.contribution(seq, source)  # wait for it
        if closing not in self._to_close[record.seq]:
            return  # closed while this rank was waiting
        terms = record.terms
        self.begin(record.seq, record, int(terms["key"]), int(terms["loss_scale_tag"]))
        for parts in late:
            self.take_late(parts)
        for peer, runs in in_time.items():
            if runs:
                blob, cuts = self.deliveries.contribution(record.seq, peer), on_time(record, peer)[1]
                self._core.deliver(record.seq, blob, runs, cuts)
        self._to_close[record.seq].remove(closing)
        self._core.close_part(record.seq, closing.runs)
        for peer in self._others:
            if self.deliveries.wants_mean(record.seq, peer, closing):
                self.deliveries.give_mean(record.seq, peer, closing, self._core.mean(record.seq, peer))
        if not record.entered and not self._to_close[record.seq]:
            self._core.drop(record.seq)

    def _needed(self, record: OpRecord, closing: Closing, late: Sequence[LateParts]) -> set[tuple[int, int]]:
        """The contributions that are in the mean of these granules, by op and rank."""
        in_time = [peer for peer in self._others if overlap(on_time(record, peer)[0], closing.runs)]
        taken_in = ((parts.seq, parts.source) for parts in late)
        return {*taken_in, *((record.seq, peer) for peer in in_time)}

    def _can_close(self, record: OpRecord, closing: Closing) -> bool:
        late = list(self._late(record, closing))
        if any(self._closes_early(self._was(parts)) for parts in late):
            return False
        if not self._own.skips.before.get(record.seq, frozenset()) <= self._skipped:
            return False
        return all(self._has(seq, source) for seq, source in self._needed(record, closing, late))

    def _has(self, seq: int, source: int) -> bool:
        """Whether a contribution to the own shard is there."""
        return seq <= self._entered if source == self._rank else self.deliveries.has_contribution(seq, source)

    def _closes_early(self, record: OpRecord) -> bool:
        closings = self._to_close[record.seq]
        return bool(closings) and closings[0].early

    # ---- late parts

    def _late(self, record: OpRecord, closing: Closing) -> Iterator[LateParts]:
        """What is added to the mean of these granules, except what joined the own contribution."""
        for parts in self._own.late.get(record.seq, []):
            if (
                parts.stage == "scatter"
                and not parts.subtracted
                and overlap(parts.runs, closing.runs)
                and self._was(parts).report.epoch == record.report.epoch
            ):
                yield parts

    def take_handed_over(self, record: OpRecord) -> None:
        """Late parts of an earlier epoch join the own contribution."""
        for parts in self._own.late.get(record.seq, []):
            if parts.stage == "scatter" and self._was(parts).report.epoch != record.report.epoch:
                self.take_late(parts)

    def take_late(self, parts: LateParts) -> None:
        """They are due from now on. What is late of the own contribution is due since the entry."""
        if parts.source == self._rank or parts.subtracted:
            return
        for came, cuts in parts.comings:
            if came:
                self._core.take_late(self.deliveries.contribution(parts.seq, parts.source), came, cuts)

    def _was(self, parts: LateParts) -> OpRecord:
        """The op that they were late for."""
        if (record := self._own.by_seq.get(parts.seq)) is not None:
            return record
        raise ReplayError(
            f"rank {self._rank} took late parts of op {parts.seq} in, of which it has no record: it died "
            "before it ended that op, and the replay cannot go on"
        )
