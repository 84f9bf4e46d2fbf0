"""The fates of an op's granules by name. Later records tell what was late from what was lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from tailcut.ledger.book import RankLedger
from tailcut.ledger.fates import Cut, LateUse, Runs
from tailcut.ledger.records import OpRecord
from tailcut.mirror import Stage

FateName = Literal["full", "trimmed", "late", "lost", "empty", "abstained"]
"""full: it came as it was sent. trimmed: its first bytes came. late: it came after its stage had ended and
was taken in by a later op. lost: it never came, or came too late for that too. empty: its owner had nothing
to send. abstained: its rank contributed nothing."""


class FateRun(NamedTuple):
    """Granules from ``first`` up to before ``last`` that had one fate."""

    stage: Stage
    shard: int
    source: int
    """The rank that it came from, or was to come from."""
    first: int
    last: int
    fate: FateName
    payload_bytes: int = 0
    """Of a trimmed packet: what came."""
    taken_in: int | None = None
    """Of what was late: the op that took it in."""


class Latecomers:
    """What one rank has taken in late, by the op that it was late for."""

    def __init__(self, ledger: RankLedger) -> None:
        self._uses: dict[tuple[int, Stage, int], list[LateUse]] = {}
        for op in ledger.ops:
            for use in op.fates.uses:
                if not use.subtracted:
                    self._uses.setdefault((use.seq, use.stage, use.source), []).append(use)

    def of(self, seq: int, stage: Stage, source: int) -> Sequence[LateUse]:
        """``source`` is a rank in SCATTER, a shard in GATHER."""
        return self._uses.get((seq, stage, source), [])


def fates_of(record: OpRecord, late: Latecomers) -> Iterator[FateRun]:
    """All runs of an op at one rank, SCATTER by rank, then GATHER by shard."""
    fates, row = record.fates, record.start.grid.row(record.rank)
    links = record.report.links
    for place, runs in enumerate(fates.contributions):
        granules = fates.granules[record.own_shard]
        missing: FateName = "abstained" if links[place].abstained else "lost"
        for run in _named(record, "scatter", place, granules, runs, (), missing, late):
            yield FateRun("scatter", record.own_shard, row[place], *run)
    for shard, granules in enumerate(fates.granules):
        if shard == record.own_shard:
            continue
        for run in _named(
            record, "gather", shard, granules, fates.answered[shard], fates.empty[shard], "lost", late
        ):
            yield FateRun("gather", shard, record.owner(shard), *run)


_Run = tuple[int, int, FateName, int, int | None]


def _named(
    record: OpRecord,
    stage: Stage,
    source: int,
    granules: int,
    came: Runs,
    empty: Runs,
    missing: FateName,
    late: Latecomers,
) -> Iterator[_Run]:
    fates: list[tuple[FateName, int, int | None]] = [(missing, 0, None)] * granules
    for first, last in came:
        fates[first:last] = [("full", 0, None)] * (last - first)
    for first, last in empty:
        fates[first:last] = [("empty", 0, None)] * (last - first)
    for cut in record.fates.cuts:
        if (cut.seq, cut.stage, cut.source, cut.late) == (record.seq, stage, source, False):
            for first, last in cut_runs(cut):
                for at in range(first, min(last, granules)):
                    if fates[at][0] == "full":
                        fates[at] = ("trimmed", cut.payload_bytes, None)
    for use in late.of(record.seq, stage, source):
        for at in range(use.first, min(use.last, granules)):
            if fates[at][0] == "lost":
                fates[at] = ("late", 0, use.user)
    begin = 0
    for at in range(1, granules + 1):
        if at == granules or fates[at] != fates[begin]:
            yield (begin, at, *fates[begin])
            begin = at


def cut_runs(cut: Cut) -> Iterator[tuple[int, int]]:
    """The granules of each of its packets."""
    for time in range(cut.times):
        first = cut.first + time * cut.granules
        yield first, first + cut.granules
