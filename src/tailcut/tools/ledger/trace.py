"""A run as spans of a Chrome trace: a process for each rank, a thread for each lane (docs/ledger.md).

Times are microseconds of the wall clock, as torch.profiler's are, so that both load side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tailcut import Ledger, OpRecord, RankLedger, StageReport, Verdict

Event = dict[str, Any]


def write_trace(ledger: Ledger, path: Path) -> None:
    """One file that chrome://tracing and Perfetto open."""
    events = [event for rank in ledger.ranks.values() for event in _of_rank(rank)]
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _of_rank(rank: RankLedger) -> Iterator[Event]:
    about = rank.start.about
    to_unix_s = about["started_unix_s"] - about["started_s"]
    name = {"name": f"tailcut rank {rank.rank} on {about['host']}"}
    yield {"ph": "M", "name": "process_name", "pid": rank.rank, "tid": 0, "args": name}
    for record in rank.ops:
        yield from _of_op(record, to_unix_s)
    for note in rank.notes:
        values = dict(note.values)
        at_us = 1e6 * (values.pop("at_s") + to_unix_s)
        yield {
            "ph": "i",
            "s": "p",
            "name": note.event,
            "pid": rank.rank,
            "tid": 0,
            "ts": at_us,
            "args": values,
        }


def _of_op(record: OpRecord, to_unix_s: float) -> Iterator[Event]:
    report = record.report
    entered_s = record.entered_s + to_unix_s
    late = {
        str(peer): str(verdict)
        for peer, verdict in zip(report.members, report.verdicts, strict=False)
        if verdict is not Verdict.ON_TIME
    }
    values = {
        "status": report.status,
        "ended_by": report.ended_by,
        "lost_frac": report.lost_frac,
        "epsilon": report.epsilon.total,
        "planes": report.scatter.planes,
        "verdicts": late,
    }
    name = f"op {record.seq}" + (f" {record.key}" if record.key else "")
    yield _span(record, name, entered_s, report.elapsed_s, values)
    for stage_name, stage in (("SCATTER", report.scatter), ("GATHER", report.gather)):
        if (span := _stage(stage)) is not None:
            begin_s, took_s = span
            yield _span(record, stage_name, entered_s + begin_s, took_s, {"ended_by": stage.ended_by})


def _stage(stage: StageReport) -> tuple[float, float] | None:
    """From the rank's own entry on, so that it lies within the span of the op."""
    if stage.began_s is None or stage.ended_s is None or stage.ended_s <= 0:
        return None
    begin_s = max(0.0, stage.began_s)
    return begin_s, max(0.0, stage.ended_s - begin_s)


def _span(record: OpRecord, name: str, begin_s: float, took_s: float, values: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "cat": "tailcut",
        "name": name,
        "pid": record.rank,
        "tid": record.lane,
        "ts": 1e6 * begin_s,
        "dur": 1e6 * took_s,
        "args": values,
    }
