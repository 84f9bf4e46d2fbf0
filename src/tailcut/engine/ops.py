"""The ops of a group: those in flight with their buckets and keys, and the totals of those that have ended.

Owns the lanes from their start to their end. Knows nothing of warnings or of packets.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from operator import le
from typing import NamedTuple, cast

from tailcut.engine.alarms import Alarms
from tailcut.engine.buffers import Bucket
from tailcut.engine.epochs import EpochKeeper
from tailcut.engine.keys import Keys
from tailcut.engine.loss_scale import tag_of
from tailcut.engine.opening import Opening
from tailcut.engine.residues import Residues
from tailcut.engine.state import State
from tailcut.engine.totals import Totals, add_lanes
from tailcut.errors import ClosedError, ConfigError, TailcutError
from tailcut.policy.epochs import Agreement
from tailcut.report import Report, engine_failed, outcome_of
from tailcut.stats import Stats
from tailcut.store import ComparingStore

RAW_BITS = 32
"""Raw coordinates travel as they are."""

SLICE_NS = 50_000_000
"""The longest single native wait, so that Ctrl-C is answered."""

_JOIN_NS = 10_000_000_000

Run = tuple[int, int]
"""The first of some coordinates of a bucket, and their number."""


class Flight:
    """One op that was submitted. Dropping it says that nobody will ask for its outcome."""

    def __init__(self, lane: int, ticket: int) -> None:
        self.lane = lane
        self.ticket = ticket


class _Entry(NamedTuple):
    bucket: Bucket
    """The engine may still write to it, so it stays alive even if its flight is dropped."""
    residue: Bucket | None
    """The same holds for it."""
    flight: weakref.ref[Flight]
    key: Hashable
    contributes: bool


class Ops:
    """The ops of one rank. One lock guards those in flight, their keys, the totals and the steering."""

    def __init__(self, opening: Opening, trim_bytes: int) -> None:
        self.lanes = opening.lanes
        self.state = None if opening.grid.rows > 1 else State(opening.lanes[0])
        self._rank = opening.rank
        self._grid = opening.grid
        self._raw = opening.codec == "raw"
        self._residues = Residues() if opening.carries_coding else None
        self._steering = opening.steering
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self._calls = 0
        self.in_order = False
        """Whether a rank that was too far behind enters nothing before ``skip_to``."""
        self._seqs = [0] * len(opening.lanes)  # of the next ops, if it was not
        self._jumped_to = [0] * len(opening.lanes)  # the first op that a lane may still enter
        self._in_flight: dict[tuple[int, int], _Entry] = {}
        self._keys: set[Hashable] = set()  # of the ops in flight
        self._named: set[Hashable] = set()  # keys that the ledger knows
        self._numbers = Keys()
        self._totals = Totals()
        self._alarms = Alarms(opening.steering, trim_bytes)
        self._epochs = keeper_of(opening)
        self.ledger = opening.ledger
        self.playback = opening.playback
        self.epoch = 0
        """The number of the epoch of the op that ended last."""
        _open.add(self)

    def submit(
        self,
        bucket: Bucket,
        key: Hashable,
        reliable: Sequence[Run] = (),
        loss_scale: float = 0.0,
        contribute: bool = True,
    ) -> Flight:
        """Enter the next op with this bucket."""
        tag = tag_of(loss_scale)
        self.check_process()  # before the lock, which a forked child may find taken for ever
        with self._lock:
            self.check_open()
            self._take_dropped()
            if key is not None and key in self._keys:
                raise ConfigError(f"key {key!r} is still in flight; wait() for it first")
            number = self.number_of(key)
            index = (number or self._calls) % len(self.lanes)
            self._calls += 1
            terms = self._steering.terms(bucket.size, keyed=key is not None)
            seq = self._seqs[index] if self.in_order else None
            residue = None
            if self._residues and contribute and key is not None:
                residue = self._residues.of(key, bucket.size, loss_scale)
            ticket = self.lanes[index].submit(
                bucket, terms, number, tag, reliable=reliable, contribute=contribute, seq=seq, residue=residue
            )
            self._seqs[index] += 1
            flight = Flight(index, ticket)
            self._in_flight[index, ticket] = _Entry(bucket, residue, weakref.ref(flight), key, contribute)
            if key is not None:
                self._keys.add(key)
                if key not in self._named:
                    self._named.add(key)
                    self.ledger.note("key", number=number, key=key if isinstance(key, str) else repr(key))
            return flight

    def take(self, lane: int, ticket: int, timeout_ns: int) -> Report | TailcutError | None:
        """What became of an op, once; None if it has not ended within the timeout."""
        native = self.lanes[lane].wait(ticket, timeout_ns)
        if native is None:
            return None
        with self._lock:
            entry = self._in_flight.pop((lane, ticket), None)
            key = entry.key if entry else None
            self._keys.discard(key)
            outcome = outcome_of(native, self._grid, self._rank, key, self.lanes[lane].failure)
            self.lanes[lane].drop_report(ticket)  # last: until here Ctrl-C loses nothing
            if isinstance(outcome, Report):
                if outcome.status == "behind":
                    reached = outcome.seq + outcome.behind_ops
                    self._jumped_to[lane] = max(self._jumped_to[lane], reached)
                    if self._residues:
                        self._residues.drop(key)
                self._note_epochs(outcome, native.ended_at / 1e9, lane)
                if entry and not entry.contributes:
                    report = self._note_fetched(outcome)
                    self.ledger.op(lane, native, report.verdicts)
                    return report
                report = self._learn(outcome, native.ended_at / 1e9)
                self.ledger.op(lane, native, report.verdicts)
                return report if report.status == "behind" else self._steering.excess() or report
            self.ledger.note("failed", seq=native.seq, lane=lane, error=str(outcome))
        return outcome

    def _note_fetched(self, report: Report) -> Report:
        """This rank has only taken the mean. How long that took says nothing about other ops."""
        self._steering.after_fetch(report)
        self._totals.add(report)
        return report

    def _note_epochs(self, report: Report, now_s: float, lane: int) -> None:
        if self._epochs is not None and report.status != "behind":
            self.epoch = report.epoch
            in_flight = sum(index == lane for index, _ in self._in_flight)
            self._epochs.after(report, now_s, report.seq + 1 + in_flight, lane)

    def _learn(self, report: Report, now_s: float) -> Report:
        report = self._steering.after(report, now_s)
        self._totals.add(report)
        self._alarms.after(report)
        return report

    def _take_dropped(self) -> None:
        """Take the outcomes that nobody will ask for."""
        for (lane, ticket), entry in list(self._in_flight.items()):
            if entry.flight() is None:
                self.take(lane, ticket, 0)

    def forget(self, key: Hashable, first: int, count: int) -> None:
        """Carry nothing more of these coordinates of a bucket: what ended ops lack of them comes another way.
        On a closed group it does nothing."""
        number = self.number_of(key)
        self.lanes[number % len(self.lanes)].forget(number, first, count)

    def number_of(self, key: Hashable) -> int:
        """The number by which the core knows a key."""
        return self._numbers.number_of(key)

    def skipped(self, reports: Iterable[Report]) -> None:
        """Nobody applied the results of these ops. On a closed group it does nothing."""
        for report in reports:
            self.ledger.note("not applied", seq=report.seq, key=repr(report.key))
            if report.key is not None:  # without a key nothing is carried
                if self._residues:
                    self._residues.drop(report.key)
                lane = self.lanes[self.number_of(report.key) % len(self.lanes)]
                lane.skipped(report.seq, report.seq)

    def hear_epochs(self) -> None:
        """Follow the epochs that others speak of. For a rank that is behind: its ops do not tell of them."""
        if self._epochs is not None:
            self._epochs.hear(max(lane.heard_epoch for lane in self.lanes))

    def settle_epochs(self, limit_s: float) -> None:
        """Wait until the epochs that this rank has heard of are in force here."""
        if self._epochs is not None:
            self.hear_epochs()
            self._epochs.settle(limit_s)

    def weights_of(self, epoch: int) -> Sequence[int]:
        """How much each rank owns in an epoch; empty where there are none."""
        return self._epochs.weights_of(epoch) if self._epochs else ()

    def resynced(self) -> None:
        self.check_open()
        self.ledger.note("resynced", seqs=self._seqs)
        if self._residues:
            self._residues.drop_all()
        for lane in self.lanes:
            lane.resynced()

    def set_away(self, away: bool) -> None:
        """Whether this rank enters no op for a while, so that nobody waits for it. To enter one ends it."""
        if self._closed or os.getpid() != self._process:
            return
        for lane in self.lanes:
            lane.set_away(away)

    @property
    def behind_ops(self) -> int:
        """Ops that the group has entered and this rank has not, over all lanes."""
        self.check_process()
        return sum(lane.behind_ops for lane in self.lanes)

    @property
    def seqs(self) -> tuple[int, ...]:
        """By lane: the next op of this rank, unless it was too far behind since the last ``skip_to``."""
        return tuple(self._seqs)

    def can_skip_to(self, seqs: Sequence[int]) -> bool:
        """Whether no lane has gone on beyond these ops."""
        return all(map(le, self._jumped_to, seqs))

    def skip_to(self, seqs: Sequence[int]) -> None:
        """Enter these ops next, by lane. What is in flight has ended."""
        self.check_open()
        self.ledger.note("skipped to", seqs=seqs)
        with self._lock:
            self._seqs = list(seqs)
            for lane, seq in zip(self.lanes, seqs, strict=True):
                lane.skip_to(seq)

    def rejoined(self) -> None:
        """This rank has the state of the others: it contributes again."""
        self.check_open()
        self.ledger.note("rejoined", seqs=self._seqs)
        if self._residues:
            self._residues.drop_all()  # of parameters that are no more
        for lane in self.lanes:
            lane.rejoined()

    def take_alarms(self) -> tuple[list[str], bool]:
        """What to warn of now, and whether an excess over the budget has begun to last."""
        with self._lock:
            alarms = self._alarms.take() + (self._epochs.take_alarms() if self._epochs else [])
            alarms += self.ledger.take_alarms()
            return alarms, self._alarms.excess_begins()

    def take_news(self) -> list[str]:
        with self._lock:
            return self._steering.take_news()

    @property
    def mean_bits(self) -> int:
        """Of a coordinate of a mean, on its way."""
        return RAW_BITS if self._raw else self._steering.mean_planes

    def stats(self) -> Stats:
        self.check_process()
        lanes = [lane.stats() for lane in self.lanes]
        with self._lock:
            stats = self._totals.with_policy(self._steering)
        if self._epochs is not None:
            stats.epoch, stats.owner_weights = self.epoch, tuple(self.weights_of(self.epoch))
        add_lanes(stats, lanes)
        return stats

    def close(self, linger_s: float) -> None:
        """End the lanes, which serve what peers still need for at most ``linger_s``."""
        if os.getpid() != self._process or self._closed:
            return
        with self._lock:
            self._closed = True
        if self._epochs is not None:
            self._epochs.close()
        for lane in self.lanes:
            lane.close(int(1e9 * linger_s))
        try:
            for lane in self.lanes:
                while not lane.join(SLICE_NS):
                    pass
        except BaseException:  # Ctrl-C: leave now, but not without the engine threads
            for lane in self.lanes:
                lane.close(0)
                lane.join(_JOIN_NS)
            raise
        finally:
            if self._epochs is not None:
                self._epochs.join()
            _open.discard(self)
            self.ledger.close()

    def check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(
                f"this group belongs to process {self._process}; a forked child must open its own "
                "(or start workers with the spawn method)"
            )

    def check_open(self) -> None:
        self.check_process()
        if self._closed:
            raise ClosedError("the group is closed")
        for lane in self.lanes:
            if lane.failure:
                raise engine_failed(lane.failure)


def keeper_of(opening: Opening) -> EpochKeeper | None:
    """What agrees on the owners with the other ranks; none where that is not possible."""
    if opening.grid.ranks == 1 or not hasattr(opening.store, "compare_set"):
        return None
    agreement = Agreement(opening.rank, opening.grid, len(opening.lanes))
    store = cast(ComparingStore, opening.store)
    return EpochKeeper(agreement, store, f"tailcut/{opening.tag:x}/", opening.lanes, opening.ledger)


_open: weakref.WeakSet[Ops] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for ops in list(_open):
        ops.close(linger_s=0.0)


def _abandon_all() -> None:
    """In a forked child: the engine threads stayed with the parent."""
    for ops in list(_open):
        for lane in ops.lanes:
            lane.abandon()


os.register_at_fork(after_in_child=_abandon_all)
