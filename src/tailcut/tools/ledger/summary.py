"""What a run cost, added up from its ledgers: by link, by source, over time, and its slowest ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from tailcut import Epsilon, Ledger, OpRecord, Verdict

SLOWEST = 5
SPANS = 20
"""Over time: so many parts of the run."""

Matrix = list[list[float]]
"""Shares by receiver and sender."""


@dataclass(frozen=True)
class Slow:
    """An op that took long at some rank, and the likely cause."""

    seq: int
    rank: int
    elapsed_s: float
    ended_by: str
    why: str


@dataclass
class Summary:
    """The figures of ``tailcut ledger show``."""

    ranks: int
    ops: int = 0
    partial_ops: int = 0
    keys: int = 0
    lasted_s: float = 0.0
    median_s: float = 0.0
    p99_s: float = 0.0
    missing: Matrix = field(default_factory=list)
    """Of the coordinates that were to come from a rank: the share that was not in time."""
    carried: Matrix = field(default_factory=list)
    """The share that was taken in by a later op."""
    trimmed: Matrix = field(default_factory=list)
    epsilon: Epsilon = Epsilon()  # noqa: RUF009
    budget: float = 0.0
    verdicts: list[Counter[str]] = field(default_factory=list)
    """By rank: what the others said of it, except that it was on time."""
    lost_over_time: list[float] = field(default_factory=list)
    elapsed_over_time_s: list[float] = field(default_factory=list)
    slowest: list[Slow] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


class _Link:
    """Coordinates from one rank to another."""

    def __init__(self) -> None:
        self.coords = self.missing = self.carried = self.trimmed = 0

    def share(self, part: int) -> float:
        return part / self.coords if self.coords else 0.0


def summarize(ledger: Ledger) -> Summary:
    """Add a run up."""
    ranks = ledger.world_size
    summary = Summary(ranks, budget=float(ledger.about["config"]["budget"]))
    links = [[_Link() for _ in range(ranks)] for _ in range(ranks)]
    verdicts: list[Counter[str]] = [Counter() for _ in range(ranks)]
    records = [record for rank in ledger.ranks.values() for record in rank.ops]
    for record in records:
        _add_links(record, links[record.rank])
        for peer, verdict in zip(record.report.members, record.report.verdicts, strict=False):
            verdicts[peer][str(verdict)] += verdict is not Verdict.ON_TIME
    summary.verdicts = [+counts for counts in verdicts]
    summary.missing = [[link.share(link.missing) for link in row] for row in links]
    summary.carried = [[link.share(link.carried) for link in row] for row in links]
    summary.trimmed = [[link.share(link.trimmed) for link in row] for row in links]
    _add_totals(summary, records)
    _add_time(summary, records)
    for rank in ledger.ranks.values():
        summary.events.update(note.event for note in rank.notes if note.event != "key")
    return summary


def _add_links(record: OpRecord, row: Sequence[_Link]) -> None:
    report, fates = record.report, record.fates
    for peer, link in zip(report.members, report.links, strict=False):
        if peer == record.rank:
            continue
        of = row[peer]
        of.coords += (0 if link.abstained else link.scatter.coords) + link.gather.coords
        of.missing += (0 if link.abstained else link.scatter.missing) + link.gather.missing
    if not fates.granules:
        return
    members, coords_each = report.members, _granule_coords(record)
    for use in fates.uses:
        peer = members[use.source] if use.stage == "scatter" else record.owner(use.source)
        row[peer].carried += (use.last - use.first) * coords_each
    for cut in fates.cuts:
        peer = members[cut.source] if cut.stage == "scatter" else record.owner(cut.source)
        row[peer].trimmed += cut.granules * cut.times * coords_each


def _granule_coords(record: OpRecord) -> int:
    """Coordinates of a granule, nearly: the last one of a shard has fewer."""
    return round(record.report.length / max(1, sum(record.fates.granules)))


def _add_totals(summary: Summary, records: Sequence[OpRecord]) -> None:
    summary.ops = len({(record.lane, record.seq) for record in records})
    summary.partial_ops = len({(r.lane, r.seq) for r in records if r.report.status == "partial"})
    summary.keys = len({record.key for record in records})
    coords = sum(record.report.length for record in records)
    if not coords:
        return
    summary.epsilon = Epsilon(
        *(
            sum(part * record.report.length for part, record in zip(parts, records, strict=True)) / coords
            for parts in zip(*(record.report.epsilon for record in records), strict=True)
        )
    )


def _add_time(summary: Summary, records: Sequence[OpRecord]) -> None:
    if not records:
        return
    took_s = sorted(record.report.elapsed_s for record in records)
    summary.median_s = median(took_s)
    summary.p99_s = took_s[min(len(took_s) - 1, int(0.99 * len(took_s)))]
    summary.lasted_s = max(
        max(record.entered_s + record.report.elapsed_s for record in of_rank)
        - min(record.entered_s for record in of_rank)
        for of_rank in _by_rank(records)
    )
    last = max(record.seq for record in records) + 1
    spans: list[list[OpRecord]] = [[] for _ in range(min(SPANS, last))]
    for record in records:
        spans[record.seq * len(spans) // last].append(record)
    for span in spans:
        coords = max(1, sum(record.report.length for record in span))
        lost = sum(record.report.lost_frac * record.report.length for record in span)
        summary.lost_over_time.append(lost / coords)
        summary.elapsed_over_time_s.append(median(r.report.elapsed_s for r in span) if span else 0.0)
    slowest = sorted(records, key=lambda record: -record.report.elapsed_s)[:SLOWEST]
    summary.slowest = [
        Slow(r.seq, r.rank, r.report.elapsed_s, r.report.ended_by, cause_of(r)) for r in slowest
    ]


def _by_rank(records: Sequence[OpRecord]) -> list[list[OpRecord]]:
    ranks: dict[int, list[OpRecord]] = {}
    for record in records:
        ranks.setdefault(record.rank, []).append(record)
    return list(ranks.values())


def cause_of(record: OpRecord) -> str:
    """Who held an op up, and why, as its rank saw it."""
    report = record.report
    judged = [
        f"rank {peer} {verdict}"
        for peer, verdict in zip(report.members, report.verdicts, strict=False)
        if verdict is not Verdict.ON_TIME
    ]
    if judged:
        return ", ".join(judged)
    last_s, stage, peer = max(
        (
            (getattr(link, stage).last_s or 0.0, stage, peer)
            for peer, link in zip(report.members, report.links, strict=False)
            for stage in ("scatter", "gather")
        ),
        default=(0.0, "", -1),
    )
    if last_s <= 0:
        return "nothing came last: this rank waited for itself"
    what = "contribution" if stage == "scatter" else "mean"
    return f"the {what} of rank {peer} came last, after {1e3 * last_s:.1f} ms"
