"""Shows a diagnosis: as tables for a person, or as one document for a program."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

from tailcut.tools.doctor import network
from tailcut.tools.doctor.check import SEVERITY
from tailcut.tools.doctor.diagnosis import Diagnosis, Placed
from tailcut.tools.doctor.findings import Findings

_WORDS = {"ok": "ok", "warn": "warn", "fail": "FAIL"}


def as_text(diagnosis: Diagnosis) -> str:
    parts = [_title(diagnosis), _checks(_folded(diagnosis.checks))]
    if any(findings.pings for findings in diagnosis.ranks.values()):
        parts.append(_matrix(diagnosis, "RTT in ms: median (min)", _rtt_cell))
        parts.append(_matrix(diagnosis, "lost, % of the datagrams in that direction", _loss_cell))
    if diagnosis.settings:
        parts.append(_settings(diagnosis))
    return "\n\n".join([*parts, _verdict(diagnosis)])


def _title(diagnosis: Diagnosis) -> str:
    hosts = len({findings.host for findings in diagnosis.ranks.values()})
    if diagnosis.world_size == 1:
        return "tailcut doctor: this host alone (with peers: torchrun, --store or --local)"
    return f"tailcut doctor: {diagnosis.world_size} ranks, {hosts} host{'s' * (hosts > 1)}"


def _folded(checks: list[Placed]) -> list[Placed]:
    """The checks grouped by name. Hosts that pass the same check share a line."""
    lines = []
    for name in dict.fromkeys(placed.check.name for placed in checks):
        named = [placed for placed in checks if placed.check.name == name]
        well = [placed for placed in named if placed.check.status == "ok"]
        lines += [placed for placed in named if placed not in well]
        if len(well) > 1:
            example = replace(well[0].check, found=f"e.g. {well[0].where}: {well[0].check.found}")
            well = [Placed(f"{len(well)} hosts", None, example)]
        lines += well
    return lines


def _checks(checks: list[Placed]) -> str:
    names = max(len(placed.check.name) for placed in checks)
    places = max(len(placed.where) for placed in checks)
    width = max(80, min(shutil.get_terminal_size((110, 24)).columns, 140))
    lines = []
    for placed in checks:
        check = placed.check
        start = f"{_WORDS[check.status]:<6}{check.name:<{names + 2}}{placed.where:<{places + 2}}"
        indent = " " * len(start)
        lines += textwrap.wrap(check.found, width, initial_indent=start, subsequent_indent=indent)
        if check.remedy:
            lines += textwrap.wrap(
                check.remedy, width, initial_indent=indent + "-> ", subsequent_indent=indent + "   "
            )
    return "\n".join(lines)


def _matrix(diagnosis: Diagnosis, title: str, cell: Callable[[Diagnosis, int, int], str]) -> str:
    ranks = range(diagnosis.world_size)
    names = [f"{rank}  {_name(diagnosis, rank)}" for rank in ranks]
    rows = [[cell(diagnosis, source, peer) for peer in ranks] for source in ranks]
    widths = [max(len(f"to {peer}"), *(len(row[peer]) for row in rows)) + 2 for peer in ranks]
    left = max(map(len, names))
    lines = [title, f"{'from':<{left}}" + "".join(f"{f'to {p}':>{widths[p]}}" for p in ranks)]
    lines += [
        f"{names[source]:<{left}}" + "".join(f"{rows[source][peer]:>{widths[peer]}}" for peer in ranks)
        for source in ranks
    ]
    return "\n".join(lines)


def _name(diagnosis: Diagnosis, rank: int) -> str:
    if rank not in diagnosis.ranks:
        return "did not report"
    return f"{diagnosis.ranks[rank].hostname} {_address(diagnosis, rank) or ''}".rstrip()


def _address(diagnosis: Diagnosis, rank: int) -> str | None:
    """The address at which the lowest other rank reaches this one."""
    pings = (findings.pings.get(rank) for findings in diagnosis.ranks.values())
    return next((ping.address for ping in pings if ping), None)


def _rtt_cell(diagnosis: Diagnosis, source: int, peer: int) -> str:
    ping = diagnosis.ranks[source].pings.get(peer) if source in diagnosis.ranks else None
    if ping is None:
        return "-"
    if ping.rtt_median_s is None or ping.rtt_min_s is None:
        return "silent"
    return f"{1e3 * ping.rtt_median_s:.3f} ({1e3 * ping.rtt_min_s:.3f})"


def _loss_cell(diagnosis: Diagnosis, source: int, peer: int) -> str:
    share = network.lost_frac(diagnosis.ranks, source, peer)
    return "-" if share is None else f"{100 * share:.1f}"


def _settings(diagnosis: Diagnosis) -> str:
    lines = ["suggested settings"]
    for setting, places in diagnosis.settings:
        where = "" if places == ["network"] or diagnosis.world_size == 1 else f" (on {', '.join(places)})"
        lines += [f"  {setting.command}", f"      # {setting.why}{where}"]
    return "\n".join(lines)


def _verdict(diagnosis: Diagnosis) -> str:
    counts = dict.fromkeys(SEVERITY, 0)
    for placed in diagnosis.checks:
        counts[placed.check.status] += 1
    return f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The same with stable keys. Matrices are indexed ``[from][to]``; null says not measured."""
    ranks = range(diagnosis.world_size)
    return {
        "tailcut": metadata.version("tailcut"),
        "exit_status": diagnosis.exit_status,
        "world_size": diagnosis.world_size,
        "ranks": [
            {"rank": r, "hostname": found.hostname, "host": found.host, "address": _address(diagnosis, r)}
            for r, found in diagnosis.ranks.items()
        ],
        "checks": [_check_as_json(placed) for placed in diagnosis.checks],
        **{
            name: [[_ping_field(diagnosis.ranks.get(a), b, name) for b in ranks] for a in ranks]
            for name in ("packet_bytes", "sent", "answered", "rtt_min_s", "rtt_median_s")
        },
        "lost_frac": [[network.lost_frac(diagnosis.ranks, a, b) for b in ranks] for a in ranks],
        "allreduce": _ops_as_json(diagnosis),
        "settings": [
            {"name": s.name, "value": s.value, "command": s.command, "why": s.why, "where": places}
            for s, places in diagnosis.settings
        ],
    }


def _check_as_json(placed: Placed) -> dict[str, Any]:
    check = placed.check
    return {
        "name": check.name,
        "status": check.status,
        "where": placed.where,
        "rank": placed.rank,
        "found": check.found,
        "remedy": check.remedy,
    }


def _ping_field(findings: Findings | None, peer: int, name: str) -> float | None:
    ping = findings.pings.get(peer) if findings else None
    return getattr(ping, name) if ping else None


def _ops_as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    ops = network.slowest_ops(diagnosis.ranks, diagnosis.world_size)
    return {
        "bucket_bytes": diagnosis.bucket_bytes,
        "elapsed_s": [op.elapsed_s for op in ops],
        "complete": [op.complete for op in ops],
        "lost_frac": [op.lost_frac for op in ops],
    }
