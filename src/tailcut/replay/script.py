"""What the ledgers of a run say that each rank is to do again: its ops, and what came of every packet.

Owns what is needed by whom, which all ranks work out alike. Knows nothing of values and of processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from tailcut import _native
from tailcut.errors import ConfigError
from tailcut.ledger.book import Ledger, RankLedger
from tailcut.ledger.fates import Cut, Fates, Runs
from tailcut.ledger.records import OpRecord
from tailcut.ledger.runs import cut_runs
from tailcut.mirror import Stage
from tailcut.replay.granules import in_order, overlap, without
from tailcut.replay.late import Late, Parts, Skips, late_parts


class Closing(NamedTuple):
    """Granules of a shard that its owner closed together, as far as others may have waited for them."""

    early: bool
    """Before it entered the op itself."""
    after: int
    """The op itself, or the latest of later ones that had closed before and of which parts were taken in."""
    runs: Runs

    @property
    def name(self) -> str:
        return f"{'early' if self.early else 'rest'}{self.after}"


class RankScript:
    """One rank of the run."""

    def __init__(self, ledger: RankLedger, only: Collection[int] | None = None) -> None:
        self.ledger = ledger
        self.rank = ledger.rank
        self._only = only
        self._planes = ledger.start.about["codec"] == "planes"  # raw values can be cut anywhere
        played = sorted((op for op in ledger.ops if self._plays(op.seq)), key=lambda op: op.seq)
        self.ops: tuple[OpRecord, ...] = tuple(op for op in played if not refused(op))
        """Those that this rank has entered and ended."""
        self.refusals: tuple[OpRecord, ...] = tuple(filter(refused, ledger.ops))
        """What it was told when it was too far behind to enter an op."""
        self.unended: Mapping[int, OpRecord] = {
            op.seq: op for op in (*ledger.served, *ledger.open) if self._plays(op.seq)
        }
        """What it did in ops that it has not entered, or was killed in."""
        self.by_seq: Mapping[int, OpRecord] = {**self.unended, **{op.seq: op for op in self.ops}}
        self._closings: dict[int, Sequence[Closing]] = {}

    def _plays(self, seq: int) -> bool:
        return self._only is None or seq in self._only

    @cached_property
    def late(self) -> Late:
        told = [op.fates for op in (*self.ledger.ops, *self.ledger.served, *self.ledger.open)]
        return late_parts([*told, self.ledger.late], self._plays, self._planes)

    @cached_property
    def skips(self) -> Skips:
        return Skips(self.late, {op.seq for op in self.ops if op.voided})

    @cached_property
    def late_for(self) -> frozenset[int]:
        """Ops that something was late for, and was taken in."""
        return frozenset(parts.seq for of_op in self.late.values() for parts in of_op)

    @cached_property
    def _needed_late(self) -> Mapping[tuple[int, Stage, int], Runs]:
        needed: dict[tuple[int, Stage, int], Runs] = {}
        for parts in (parts for of_op in self.late.values() for parts in of_op):
            place = (parts.seq, parts.stage, parts.source)
            needed[place] = in_order((*needed.get(place, ()), *parts.runs))
        return needed

    def closings(self, seq: int) -> Sequence[Closing]:
        """In which parts this rank closed its shard, in order; cached, for all ranks ask for it."""
        if seq not in self._closings:
            self._closings[seq] = list(self._find_closings(self.by_seq[seq]))
        return self._closings[seq]

    def _find_closings(self, op: OpRecord) -> Iterator[Closing]:
        if op.voided or not op.fates.granules:
            return
        whole = op.fates.answered[op.own_shard]
        later: dict[int, Runs] = {}  # by later op
        for parts in self.late.get(op.seq, []):
            if parts.stage == "scatter" and parts.seq > op.seq:
                later[parts.seq] = in_order((*later.get(parts.seq, ()), *self._closed_with(op, parts.runs)))
        before = early(op)
        for of_entry, runs in ((True, before), (False, without(whole, before))):
            found = []
            for seq in sorted(later, reverse=True):
                found.append(Closing(of_entry, seq, overlap(runs, later[seq])))
                runs = without(runs, later[seq])
            found.append(Closing(of_entry, op.seq, runs))
            yield from (closing for closing in reversed(found) if closing.runs)

    def _closed_with(self, op: OpRecord, runs: Runs) -> Runs:
        """What closed together with these granules: a stripe of planes closes as a whole."""
        if not self._planes:
            return runs
        edges = _native.stripe_edges(op.report.links[self.rank].scatter.coords)
        stripes = pairwise(edges)
        return tuple(stripe for stripe in stripes if overlap((stripe,), runs))

    @cached_property
    def last_use(self) -> Mapping[tuple[int, str, int], int]:
        """By op, stage and sender: the last op that takes something of it in."""
        last: dict[tuple[int, str, int], int] = {}
        for user, of_op in self.late.items():
            for parts in of_op:
                sender = parts.source
                if parts.stage == "gather":
                    sender = self.by_seq[parts.seq].owner(parts.source)
                place = (parts.seq, parts.stage, sender)
                last[place] = max(user, last.get(place, -1))
        return last

    def needs_contribution(self, seq: int, rank: int) -> bool:
        """Whether anything of what a rank contributed to this rank's shard was used, in time or late."""
        op = self.by_seq.get(seq)
        in_time = (
            op is not None and not op.voided and bool(op.fates.granules and op.fates.contributions[rank])
        )
        return in_time or (seq, "scatter", rank) in self._needed_late

    def needed_mean(self, seq: int, owner: int) -> Runs:
        """What of the mean of this owner's shard was used, in time or late."""
        op = self.by_seq.get(seq)
        if op is None or op.voided or not op.fates.granules:
            return ()
        shard = shard_of(op, owner)
        late = self._needed_late.get((seq, "gather", shard), ())
        return in_order((*came_with_values(op.fates, shard), *late))


class Script:
    """The whole run, or some of its ops."""

    def __init__(self, ledger: Ledger, only: Collection[int] | None = None) -> None:
        check_whole(ledger)
        self.ledger = ledger
        self.about = ledger.about
        self.ranks = {rank: RankScript(of_rank, only) for rank, of_rank in ledger.ranks.items()}


def check_whole(ledger: Ledger) -> None:
    """Refuse what cannot be replayed, and say why."""
    where = f"{str(ledger.directory)!r} cannot be replayed"
    if ledger.missing_ranks:
        missing = ", ".join(map(str, ledger.missing_ranks))
        raise ConfigError(f"{where}: the ledgers of ranks {missing} are missing; copy them from their hosts")
    about = ledger.about
    for name, only, why in (
        ("rows", 1, "the run was a grid, whose sums of rows are not on record"),
        ("lanes", 1, "the run had several lanes"),
        ("over_budget", None, "owners skipped what was over the budget (over_budget='skip')"),
    ):
        value = about["rows"] if name == "rows" else about["config"][name]
        if value != only and not (name == "over_budget" and value != "skip"):
            raise ConfigError(f"{where}: {why}")
    for rank, of_rank in ledger.ranks.items():
        lost = [*of_rank.damage, *(f"{gap.records} records: {gap.reason}" for gap in of_rank.gaps)]
        torn = not of_rank.closed and len(lost) == 1 and of_rank.damage  # a killed rank's last record
        if lost and not torn:
            raise ConfigError(f"{where}: the ledger of rank {rank} has gaps ({lost[0]})")


def refused(op: OpRecord) -> bool:
    """The rank was further behind than the window, and nothing became of the op."""
    return op.report.status == "behind" and not op.fates.granules


def shard_of(op: OpRecord, owner: int) -> int:
    """The shard that a rank owns in this op."""
    return next(shard for shard in range(len(op.fates.granules)) if op.owner(shard) == owner)


def early(op: OpRecord) -> Runs:
    """What of its shard a rank had closed before it entered the op: its own contribution is not in there. One
    that only takes the means may as well have closed all of it."""
    if op.voided or not op.fates.granules:
        return ()
    return without(op.fates.answered[op.own_shard], op.fates.contributions[op.rank])


def on_time(op: OpRecord, rank: int) -> Parts:
    """What of a rank's contribution is in the mean."""
    return op.fates.contributions[rank], _cuts(op, "scatter", rank)


def in_time(op: OpRecord, shard: int) -> Parts:
    """What of a mean came in time, with values."""
    return came_with_values(op.fates, shard), _cuts(op, "gather", shard)


def came_with_values(fates: Fates, shard: int) -> Runs:
    return without(fates.answered[shard], fates.empty[shard])


def _cuts(op: OpRecord, stage: Stage, source: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for cut in op.fates.cuts:
        if (cut.seq, cut.stage, cut.source, cut.late) == (op.seq, stage, source, False):
            found.update(_bytes_by_granule(cut))
    return found


def _bytes_by_granule(cut: Cut) -> dict[int, int]:
    return {first: cut.payload_bytes for first, _ in cut_runs(cut)}
