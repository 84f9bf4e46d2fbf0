"""Shows a simulated run: as a table for a person, or as JSON for a program."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from tailcut.tools.sim.figures import Side
from tailcut.tools.sim.options import Options
from tailcut.tools.sim.run import Row

_COLUMNS = (
    ("p50", "(ms)"),
    ("p90", "(ms)"),
    ("p99", "(ms)"),
    ("max", "(ms)"),
    ("p99/p50", ""),
    ("goodput", "(% of bound)"),
    ("delivered", "(%)"),
    ("by next op", "(% of means)"),
    ("NMSE", ""),
    ("lost", "(%)"),
    ("queue", "(%)"),
    ("late", "(%)"),
    ("trimmed", "(%)"),
    ("no rank", "(%)"),
)


def title(options: Options, row: Row) -> str:
    """The lines that say what the figures of a row are about."""
    network, scenario = row.conditions.network, options.scenario
    own = f"{options.codec}, {options.planes} planes" if options.codec == "planes" else options.codec
    lines = [
        f"# {scenario.name}: {row.ranks} ranks, {network.bytes_per_s * 8e-9:g} Gbit/s, "
        f"MTU {row.conditions.mtu_bytes}, queue {network.queue_bytes / 1e6:g} MB, seed {network.seed}",
        f"# {options.size_bytes} bytes a bucket ({own}), {options.ops} ops, of which the first "
        f"{options.warmup_ops} do not count; deadline {1e3 * row.deadline_s:.4g} ms, "
        f"{'adapted' if options.adaptive else 'fixed'} bounds",
    ]
    if machine := network.machine:
        lines.append(
            f"# as in a testbed on {machine.cores} cores, where a packet takes one of them for "
            f"{1e6 * machine.packet_cost_s:g} us"
        )
    if network.bursts:
        bursts = network.bursts
        every_ms = 1e3 * (bursts.gap_min_s + bursts.gap_mean_s)
        volume_mb = bursts.volume_bytes / 1e6
        lines.append(f"# bursts of {volume_mb:.4g} MB into every port, about every {every_ms:.4g} ms")
    if flows := network.neighbours:
        lines.append(
            f"# TCP flows of {flows.flow_bytes / 1e6:.4g} MB into every port, one after the other, "
            f"{1e3 * flows.gap_mean_s:.4g} ms apart on average"
        )
    return "\n".join(lines)


def header() -> str:
    """The lines above the sides of the first row."""
    names = f"{'ranks':>6} {'':<10}" + "".join(f"{name:>13}" for name, _ in _COLUMNS)
    units = f"{'':>6} {'':<10}" + "".join(f"{unit:>13}" for _, unit in _COLUMNS)
    return f"{names}\n{units.rstrip()}"


def lines(row: Row) -> list[str]:
    """The lines of a row: one for each side, and one for ops that did not end."""
    text = [f"{row.ranks:>6} {name:<10}{_cells(name, side)}".rstrip() for name, side in row.sides.items()]
    for name, side in row.sides.items():
        if side.unfinished:
            text.append(f"{'':>6} {name}: {side.unfinished} ops never ended on their ranks")
    own = row.sides["tailcut"]
    for name, side in row.sides.items():
        if side is not own and np.isfinite(side.percentile_s(99)):
            text.append(
                f"{'':>6} {name} / tailcut: p50 {side.percentile_s(50) / own.percentile_s(50):.2f}, "
                f"p99 {side.percentile_s(99) / own.percentile_s(99):.2f}"
            )
    return text


def _cells(name: str, side: Side) -> str:
    times = "".join(f"{1e3 * side.percentile_s(q):>13.3f}" for q in (50, 90, 99, 100))
    text = times + f"{side.tail:>13.3f}{100 * side.goodput:>13.1f}"
    losses = side.losses
    nmse = f"{side.nmse:.2g}" + ("" if side.nmse_is_measured else "*")
    text += f"{100 * side.delivered:>13.5g}{100 * side.by_next_op:>13.5g}{nmse:>13}"
    for share in (losses.lost, losses.queue, losses.late, losses.trimmed, losses.dropped_rank):
        text += f"{100 * share:>13.3g}"
    return text


FOOTNOTE = "* predicted from fates and codec, for independent vectors; --values measures it"


def as_json(options: Options, rows: list[Row]) -> dict[str, Any]:
    """A whole run, with the time of every op at every rank."""
    return {
        "command": "sim",
        "options": {**asdict(options), "warmup": options.warmup_ops},
        "rows": [
            {
                "ranks": row.ranks,
                "deadline_s": row.deadline_s,
                "network": asdict(row.conditions.network),
                "sides": {name: _side_as_json(side) for name, side in row.sides.items()},
            }
            for row in rows
        ],
    }


def _side_as_json(side: Side) -> dict[str, Any]:
    # An op that never ended has no time, and JSON has no infinity: it is null.
    def finite(value: float) -> float | None:
        return value if np.isfinite(value) else None

    return {
        **{f"p{q}_s": finite(side.percentile_s(q)) for q in (50, 90, 99)},
        "max_s": finite(side.percentile_s(100)),
        "p99_over_p50": finite(side.tail),
        "goodput_of_bound": side.goodput,
        "bound_s": side.bound_s,
        "unfinished": side.unfinished,
        "delivered_frac": side.delivered,
        "means_by_next_op_frac": side.by_next_op,
        "nmse": finite(side.nmse),
        "nmse_is_measured": side.nmse_is_measured,
        "losses": asdict(side.losses),
        "notes": side.notes,
        "times_s": [round(float(t), 9) for t in side.times_s],
    }
