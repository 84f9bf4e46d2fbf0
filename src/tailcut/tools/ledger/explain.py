"""How the mean of a single op came about, granule by granule: who is in it, and what was carried into it.

Runs of granules that came about alike are one line. Knows nothing of files and of replaying.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tailcut.ledger.book import Ledger
from tailcut.ledger.records import OpRecord
from tailcut.ledger.runs import FateRun, Latecomers, fates_of

MOST_LINES = 24
"""Of each shard."""


def explain(ledger: Ledger, seq: int) -> Iterator[str]:
    """The means of all shards, each as its owner closed it."""
    for record in ledger.op(seq).values():
        if record.voided or not record.fates.granules:
            yield f"shard of rank {record.rank}: void, nobody applied it"
            continue
        granules = record.fates.granules[record.own_shard]
        yield f"shard {record.own_shard}, owner rank {record.rank}: {granules} granules of 64 coordinates"
        lines = list(_lines(ledger, record))
        yield from lines[:MOST_LINES]
        if len(lines) > MOST_LINES:
            yield f"  and {len(lines) - MOST_LINES} more runs of granules"


def _lines(ledger: Ledger, record: OpRecord) -> Iterator[str]:
    granules = record.fates.granules[record.own_shard]
    parts = [_parts_at(ledger, record, at) for at in _edges(ledger, record)]
    edges = [*_edges(ledger, record), granules]
    begin = 0
    for at in range(1, len(parts) + 1):
        if at == len(parts) or parts[at] != parts[begin]:
            yield f"  granules {edges[begin]} to {edges[at] - 1}: {parts[begin]}"
            begin = at


def _scatter(ledger: Ledger, record: OpRecord) -> list[FateRun]:
    late = Latecomers(ledger.ranks[record.rank])
    return [run for run in fates_of(record, late) if run.stage == "scatter"]


def _edges(ledger: Ledger, record: OpRecord) -> list[int]:
    """Where something may change."""
    runs = _scatter(ledger, record)
    uses = [use for op in ledger.ranks[record.rank].ops for use in op.fates.uses if use.user == record.seq]
    carried = [edge for use in uses if use.stage == "scatter" for edge in (use.first, use.last)]
    granules = record.fates.granules[record.own_shard]
    return sorted({0, *(run.first for run in runs), *(edge for edge in carried if edge < granules)})


def _parts_at(ledger: Ledger, record: OpRecord, granule: int) -> str:
    """What the mean of a granule is made of, in words."""
    fates = {run.source: run for run in _scatter(ledger, record) if run.first <= granule < run.last}
    present = [run for run in fates.values() if run.fate in ("full", "trimmed")]
    carried = list(_carried(ledger, record, granule))
    if not present and not carried:
        return f"EMPTY: nobody's contribution was in time ({_absent(fates)})"
    words = [f"the mean of {len(present)} of {len(fates)}"] if present else ["nobody's in time"]
    trimmed = [f"rank {run.source} to {run.payload_bytes} bytes" for run in present if run.fate == "trimmed"]
    words += [f"trimmed: {', '.join(trimmed)}"] if trimmed else []
    words += [f"without {absent}"] if (absent := _absent(fates)) else []
    words += [f"plus {', '.join(carried)}, each 1/{len(fates)} of its difference"] if carried else []
    return "; ".join(words)


def _absent(fates: Mapping[int, FateRun]) -> str:
    words = []
    for rank, run in fates.items():
        if run.fate not in ("full", "trimmed"):
            taken = f", in op {run.taken_in}" if run.taken_in is not None else ""
            words.append(f"rank {rank} ({run.fate}{taken})")
    return ", ".join(words)


def _carried(ledger: Ledger, record: OpRecord, granule: int) -> Iterator[str]:
    for op in ledger.ranks[record.rank].ops:
        for use in op.fates.uses:
            if use.user == record.seq and use.stage == "scatter" and use.first <= granule < use.last:
                sign = "less" if use.subtracted else "late"
                yield f"rank {use.source}'s of op {use.seq} ({sign})"
