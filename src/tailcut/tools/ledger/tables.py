"""A ledger as tables: ops, links, fates and notes, each a list of rows by column name (docs/ledger.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tailcut import Ledger, OpRecord
from tailcut.ledger.runs import Latecomers, fates_of
from tailcut.mirror import plain

Row = dict[str, Any]


def ops(ledger: Ledger) -> Iterator[Row]:
    """A row for each op and rank."""
    for rank in ledger.ranks.values():
        for record in rank.ops:
            yield _op(record)


def _op(record: OpRecord) -> Row:
    report, bounds = record.report, record.terms["bounds"]
    return {
        "rank": record.rank,
        "op": record.seq,
        "lane": record.lane,
        "key": record.key,
        "status": "void" if record.voided else report.status,
        "scatter_ended_by": report.scatter.ended_by,
        "gather_ended_by": report.gather.ended_by,
        "length": report.length,
        "entered_s": record.entered_s,
        "elapsed_s": report.elapsed_s,
        "scatter_s": report.scatter.took_s,
        "gather_s": report.gather.took_s,
        "epoch": report.epoch,
        "contributed": report.contributed,
        "behind_ops": report.behind_ops,
        "non_finite": report.non_finite,
        "planes": report.scatter.planes,
        "gather_planes": report.gather.planes,
        "lost_frac": report.lost_frac,
        "epsilon": report.epsilon.total,
        **{f"epsilon_{source}": value for source, value in report.epsilon._asdict().items()},
        **report.traffic._asdict(),
        "carried_coords": report.carried_coords,
        "late_coords": report.late_coords,
        "scatter_bound_s": bounds["scatter_s"],
        "gather_bound_s": bounds["gather_s"],
        "deadline_s": bounds["deadline_s"],
        "incast": record.terms["incast"],
        "mean_hash": f"{record.fates.mean_hash:016x}",
    }


def links(ledger: Ledger) -> Iterator[Row]:
    """A row for each op, rank and peer of it: what came from there."""
    for rank in ledger.ranks.values():
        for record in rank.ops:
            report = record.report
            for peer, link, verdict in zip(report.members, report.links, report.verdicts, strict=False):
                yield {
                    "rank": record.rank,
                    "op": record.seq,
                    "peer": peer,
                    "verdict": str(verdict),
                    "entered_s": link.entered_s,
                    "silent": link.silent,
                    "abstained": link.abstained,
                    "awaited": link.awaited,
                    "left": link.left,
                    "behind_ops": link.behind_ops,
                    **{f"scatter_{name}": value for name, value in link.scatter._asdict().items()},
                    **{f"gather_{name}": value for name, value in link.gather._asdict().items()},
                    "sent_packets": link.sent_packets,
                    "sent_lost_packets": link.sent_lost_packets,
                    "received_packets": link.received_packets,
                    "received_lost_packets": link.received_lost_packets,
                }


def fates(ledger: Ledger) -> Iterator[Row]:
    """A row for each run of granules that did not come whole and in time."""
    for rank in ledger.ranks.values():
        late = Latecomers(rank)
        for record in rank.ops:
            for run in fates_of(record, late):
                if run.fate != "full":
                    yield {"rank": record.rank, "op": record.seq, **run._asdict()}


def notes(ledger: Ledger) -> Iterator[Row]:
    """A row for each event beside the ops. Its values are JSON."""
    for rank in ledger.ranks.values():
        for note in rank.notes:
            values = {name: value for name, value in note.values.items() if name != "at_s"}
            yield {
                "rank": rank.rank,
                "at_s": note.values["at_s"],
                "event": note.event,
                "values": json.dumps(plain(values)),
            }


TABLES: dict[str, Callable[[Ledger], Iterator[Row]]] = {
    "ops": ops,
    "links": links,
    "fates": fates,
    "notes": notes,
}
