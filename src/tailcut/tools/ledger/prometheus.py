"""A run as metrics in Prometheus' text format, for node-exporter's textfile collector (docs/ledger.md).

The file is replaced as a whole, so that a collector never reads half of it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tailcut import Ledger, RankLedger, Verdict

Labels = tuple[tuple[str, str], ...]
Totals = defaultdict[Labels, float]

QUANTILES = (0.5, 0.99)


class Metric(NamedTuple):
    """One metric with all its samples."""

    name: str
    kind: str
    about: str
    samples: Mapping[Labels, float]


def write_metrics(ledger: Ledger, path: Path) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text("".join(map(_text, metrics(ledger))))
    os.replace(partial, path)


def metrics(ledger: Ledger) -> Iterator[Metric]:
    """All metrics of a run."""
    totals: dict[str, Totals] = {name: defaultdict(float) for name in _COUNTERS}
    gauges: dict[str, dict[Labels, float]] = {name: {} for name in _GAUGES}
    for rank in ledger.ranks.values():
        _count(rank, totals)
        _gauge(rank, gauges)
    gauges["tailcut_budget_ratio"][()] = float(ledger.about["config"]["budget"])
    for name, about in _COUNTERS.items():
        yield Metric(name, "counter", about, totals[name])
    for name, about in _GAUGES.items():
        yield Metric(name, "gauge", about, gauges[name])


_COUNTERS = {
    "tailcut_ops_total": "Ops that have ended, by status.",
    "tailcut_op_seconds_total": "Seconds between the entry into ops and their end.",
    "tailcut_coordinates_total": "Coordinates that were to come from a peer, by stage.",
    "tailcut_missing_coordinates_total": "Of these, those that did not come in time.",
    "tailcut_carried_coordinates_total": "Coordinates of late means that later ops have taken in.",
    "tailcut_packets_total": "DATA packets, by direction.",
    "tailcut_bytes_total": "Bytes of DATA packets, by direction.",
    "tailcut_resent_packets_total": "Packets that were sent again.",
    "tailcut_trimmed_packets_total": "Packets that came trimmed.",
    "tailcut_late_packets_total": "Packets that came after their stage had ended.",
    "tailcut_verdicts_total": "How often a peer was judged late, lossy or silent.",
    "tailcut_events_total": "Epochs, skipped steps, resyncs and what else is noted beside ops.",
    "tailcut_unrecorded_total": "Records that the disk has cost.",
}

_GAUGES = {
    "tailcut_epsilon_ratio": "Error of the mean gradient over the latest ops, by source.",
    "tailcut_budget_ratio": "What Config.budget allows of it.",
    "tailcut_op_seconds": "Quantiles of the time of the latest ops.",
    "tailcut_planes": "Bits of a coordinate in the latest op, by stage; 0 is raw.",
    "tailcut_epoch": "Number of the agreement on the owners.",
}

LATEST_OPS = 100
"""What gauges are about."""


def _labels(rank: int, **more: object) -> Labels:
    return (("rank", str(rank)), *((name, str(value)) for name, value in more.items()))


def _count(rank: RankLedger, totals: Mapping[str, Totals]) -> None:
    own = _labels(rank.rank)
    for record in rank.ops:
        report, traffic = record.report, record.report.traffic
        totals["tailcut_ops_total"][_labels(rank.rank, status=report.status)] += 1
        totals["tailcut_op_seconds_total"][own] += report.elapsed_s
        totals["tailcut_carried_coordinates_total"][own] += report.carried_coords
        for direction in ("sent", "received"):
            labels = _labels(rank.rank, direction=direction)
            totals["tailcut_packets_total"][labels] += getattr(traffic, f"{direction}_packets")
            totals["tailcut_bytes_total"][labels] += getattr(traffic, f"{direction}_bytes")
        for name in ("resent", "trimmed", "late"):
            totals[f"tailcut_{name}_packets_total"][own] += getattr(traffic, f"{name}_packets")
        for peer, link, verdict in zip(report.members, report.links, report.verdicts, strict=False):
            if peer == rank.rank:
                continue
            for stage in ("scatter", "gather"):
                labels = _labels(rank.rank, peer=peer, stage=stage)
                totals["tailcut_coordinates_total"][labels] += getattr(link, stage).coords
                totals["tailcut_missing_coordinates_total"][labels] += getattr(link, stage).missing
            if verdict is not Verdict.ON_TIME:
                totals["tailcut_verdicts_total"][_labels(rank.rank, peer=peer, verdict=verdict)] += 1
    for note in rank.notes:
        if note.event != "key":
            totals["tailcut_events_total"][_labels(rank.rank, event=note.event)] += 1
    totals["tailcut_unrecorded_total"][own] += sum(gap.records for gap in rank.gaps)


def _gauge(rank: RankLedger, gauges: Mapping[str, dict[Labels, float]]) -> None:
    latest = [record.report for record in rank.ops[-LATEST_OPS:]]
    if not latest:
        return
    for source in latest[0].epsilon._fields:
        mean = sum(getattr(report.epsilon, source) for report in latest) / len(latest)
        gauges["tailcut_epsilon_ratio"][_labels(rank.rank, source=source)] = mean
    took_s = sorted(report.elapsed_s for report in latest)
    for quantile in QUANTILES:
        place = min(len(took_s) - 1, int(quantile * len(took_s)))
        gauges["tailcut_op_seconds"][_labels(rank.rank, quantile=quantile)] = took_s[place]
    gauges["tailcut_planes"][_labels(rank.rank, stage="scatter")] = latest[-1].scatter.planes
    gauges["tailcut_planes"][_labels(rank.rank, stage="gather")] = latest[-1].gather.planes
    gauges["tailcut_epoch"][_labels(rank.rank)] = latest[-1].epoch


def _text(metric: Metric) -> str:
    lines = [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}"]
    for labels, value in metric.samples.items():
        inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
        lines.append(f"{metric.name}{'{' + inside + '}' if inside else ''} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
