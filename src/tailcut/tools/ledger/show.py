"""A run, or one op of it, as text of one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tailcut import Ledger, OpRecord
from tailcut.ledger.runs import Latecomers, fates_of
from tailcut.tools.ledger.summary import Matrix, Summary, cause_of

_BARS = " ▁▂▃▄▅▆▇█"
MOST_COLUMNS = 12
"""A matrix of more ranks shows the links that are worst instead."""

MOST_RUNS = 12
"""Of one op and rank: so many runs are listed."""


def screen(ledger: Ledger, summary: Summary) -> Iterator[str]:
    """A run, line by line."""
    about = ledger.about
    yield (
        f"{ledger.run}: {summary.ranks} ranks on {about['hosts']} hosts, codec {about['codec']}, "
        f"tailcut {about['tailcut']}"
    )
    for loss in ledger.losses():
        yield f"  not on record: {loss}"
    yield (
        f"{summary.ops} ops of {summary.keys} buckets in {summary.lasted_s:.1f} s, "
        f"{summary.partial_ops} partial; an op takes {1e3 * summary.median_s:.2f} ms, "
        f"one in a hundred {1e3 * summary.p99_s:.2f} ms"
    )
    yield f"budget: ε {summary.epsilon} of {summary.budget:.1%} allowed"
    if summary.events:
        yield "events: " + ", ".join(f"{count} × {event}" for event, count in summary.events.most_common())
    for title, matrix in (
        ("not in time", summary.missing),
        ("of it taken in later", summary.carried),
        ("trimmed", summary.trimmed),
    ):
        if any(map(any, matrix)):
            yield ""
            yield f"{title}, % of the coordinates of each link"
            yield from _matrix(matrix)
    if any(summary.verdicts):
        yield ""
        yield "what the others said of a rank"
        for rank, counts in enumerate(summary.verdicts):
            if counts:
                told = ", ".join(f"{verdict} {count} times" for verdict, count in counts.most_common())
                yield f"  rank {rank}: {told}"
    if summary.lost_over_time:
        yield ""
        yield f"over time   lost, up to {max(summary.lost_over_time):.1%}   {_bars(summary.lost_over_time)}"
        longest_s = max(summary.elapsed_over_time_s)
        yield f"            op, up to {1e3 * longest_s:.2f} ms   {_bars(summary.elapsed_over_time_s)}"
    if summary.slowest:
        yield ""
        yield "slowest     op  at rank        ms  ended by  why"
        for slow in summary.slowest:
            took_ms = 1e3 * slow.elapsed_s
            yield f"  {slow.seq:>12} {slow.rank:>8} {took_ms:>9.2f}  {slow.ended_by:<8}  {slow.why}"


def _matrix(matrix: Matrix) -> Iterator[str]:
    if len(matrix) > MOST_COLUMNS:
        cells = [(share, to, source) for to, row in enumerate(matrix) for source, share in enumerate(row)]
        for share, to, source in sorted(cells, reverse=True)[:MOST_COLUMNS]:
            if share:
                yield f"  from {source} to {to}: {100 * share:.2f}"
        return
    yield "  to \\ from " + "".join(f"{source:>8}" for source in range(len(matrix)))
    for to, row in enumerate(matrix):
        cells_of_row = ("." if source == to else f"{100 * share:.2f}" for source, share in enumerate(row))
        yield f"  {to:>9} " + "".join(f"{cell:>8}" for cell in cells_of_row)


def _bars(values: Sequence[float]) -> str:
    most = max(values)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] if most else " " for value in values)


def one_op(ledger: Ledger, seq: int) -> Iterator[str]:
    """One op as every rank saw it."""
    records = ledger.op(seq)
    first = next(iter(records.values()))
    key = f", bucket {first.key}" if first.key else ""
    yield f"op {seq}: {first.report.length} coordinates{key}, epoch {first.report.epoch}"
    for rank in ledger.ranks:
        if rank not in records:
            yield f"rank {rank}: not on record"
    for loss in ledger.losses():
        yield f"  not on record: {loss}"
    for record in records.values():
        yield from _at_rank(record, Latecomers(ledger.ranks[record.rank]))


def _at_rank(record: OpRecord, late: Latecomers) -> Iterator[str]:
    report, bounds = record.report, record.terms["bounds"]
    yield ""
    yield f"rank {record.rank}, owner of shard {record.own_shard}: {report}" + (
        "; void: its epoch was replaced" if record.voided else ""
    )
    if report.status == "behind":
        return
    yield (
        f"  SCATTER ended by {report.scatter.ended_by} after {_ms(report.scatter.took_s)} "
        f"of {_ms(bounds['scatter_s'])}, "
        f"GATHER by {report.gather.ended_by} after {_ms(report.gather.took_s)} of {_ms(bounds['gather_s'])}; "
        f"planes {report.scatter.planes or 'raw'} and {report.gather.planes or 'raw'}; {cause_of(record)}"
    )
    if not report.contributed:
        yield "  it abstained"
    if report.non_finite:
        yield "  an Inf or a NaN was accepted: nobody applies it"
    runs = [run for run in fates_of(record, late) if run.fate != "full"]
    for run in runs[:MOST_RUNS]:
        what = "contribution" if run.stage == "scatter" else "mean"
        more = f" to {run.payload_bytes} bytes" if run.fate == "trimmed" else ""
        more += f", taken in by op {run.taken_in}" if run.taken_in is not None else ""
        yield (
            f"  granules {run.first} to {run.last - 1} of shard {run.shard}: the {what} of rank {run.source} "
            f"was {run.fate}{more}"
        )
    if len(runs) > MOST_RUNS:
        yield f"  and {len(runs) - MOST_RUNS} more runs that did not come whole and in time (export has all)"
    for use in record.fates.uses:
        what = f"rank {use.source}" if use.stage == "scatter" else f"the mean of shard {use.source}"
        verb = "takes back" if use.subtracted else "takes in"
        granules = f"granules {use.first} to {use.last - 1}"
        yield f"  op {use.user} {verb} {granules} of {what}, late for op {use.seq}"
    if record.fates.stood_in:
        shards = ", ".join(map(str, record.fates.stood_in))
        yield f"  {record.fates.stand_in:.3g} of its own gradient stands where means of shards {shards} lack"
    yield f"  hash of its shard {record.fates.mean_hash:016x}"


def _ms(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{1e3 * seconds:.2f} ms"
