"""Shows a run: with the columns of nccl-tests for a person, or as JSON for a program."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any, TextIO

from tailcut.tools.bench.allreduce import Options, Row
from tailcut.tools.bench.figures import Figures, Ratio, ratio, wire_ratio


def header(options: Options) -> str:
    """The lines above the first row."""
    bucket = f"{'size':>12}{'count':>12}"
    units = f"{'(B)':>12}{'(floats)':>12}"
    if len(options.sides) == 1:
        columns = bucket + "".join(f"{c:>13}" for c in ("p50", "p99", "algbw", "busbw", "delivered", "NMSE"))
        units += "".join(f"{u:>13}" for u in ("(us)", "(us)", "(GB/s)", "(GB/s)", "(%)", ""))
    else:
        own, other = options.sides
        titles = (f"{own} p50", "p99", "busbw", f"{other} p50", "p99", "busbw")
        columns = bucket + "".join(f"{title:>13}" for title in titles)
        columns += f"{f'{other}/{own} p50':>22}{f'{other}/{own} p99':>22}{'delivered':>13}{'NMSE':>13}"
        units += "".join(f"{u:>13}" for u in ("(us)", "(us)", "(GB/s)", "(us)", "(us)", "(GB/s)"))
        units += f"{'median (min-max)':>22}{'median (min-max)':>22}{'(%)':>13}"
    return f"{columns}\n{units.rstrip()}"


def line(row: Row) -> str:
    """One row."""
    own, *others = row.sides.values()
    text = f"{row.size_bytes:>12}{own.count:>12}"
    if others:
        for figures in (own, *others):
            text += f"{_us(figures.p50_s)}{_us(figures.p99_s)}{_gb(figures.busbw)}"
        for q in (50, 99):
            text += f"{_spread(ratio(others[0], own, q)):>22}"
    else:
        text += f"{_us(own.p50_s)}{_us(own.p99_s)}{_gb(own.algbw)}{_gb(own.busbw)}"
    return text + f"{100 * own.delivered:>13.5g}{own.nmse:>13.2g}"


def details(row: Row) -> list[str]:
    """The lines below a row on a testbed: what the network carried, and how long the longest op took."""
    own, *others = row.sides.values()
    if own.wire_bytes is None:
        return []
    lines = [
        f"{name:>12}: {figures.wire_bytes / 1e6:.2f} MB on the wire, longest {1e3 * figures.max_s:.1f} ms, "
        f"{100 * figures.delivered:.5g} % delivered, {figures.trimmed:.0f} packets trimmed, "
        f"NMSE {figures.nmse:.2g}"
        for name, figures in row.sides.items()
        if figures.wire_bytes is not None
    ]
    for other in others:
        on_wire = wire_ratio(other, own)
        lines.append(
            f"{'ratios':>12}: longest {_spread(ratio(other, own, 100))}"
            + (f", bytes on the wire {_spread(on_wire)}" if on_wire else "")
        )
    return lines


def as_json(
    options: Options, machine: dict[str, Any], memcpy_bytes_per_s: float, rows: list[Row]
) -> dict[str, Any]:
    """A whole run, with the time of the slowest rank in every op."""
    iters = [options.iters_for(size_bytes) for size_bytes in options.sizes_bytes]
    return {
        "benchmark": "allreduce",
        "options": {**asdict(options), "iters": iters},
        "machine": machine,
        "memcpy_bytes_per_s": memcpy_bytes_per_s,
        "rows": [_row_as_json(row) for row in rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    own, *others = row.sides.values()
    return {
        "ranks": row.ranks,
        "size_bytes": row.size_bytes,
        "count": own.count,
        "sides": {name: _figures_as_json(figures) for name, figures in row.sides.items()},
        "ratio": _ratios_as_json(others[0], own) if others else None,
    }


def _ratios_as_json(other: Figures, own: Figures) -> dict[str, Any]:
    on_wire = wire_ratio(other, own)
    return {
        **{f"p{q}": _ratio_as_json(ratio(other, own, q)) for q in (50, 99)},
        "max": _ratio_as_json(ratio(other, own, 100)),
        "wire_bytes": _ratio_as_json(on_wire) if on_wire else None,
    }


def _figures_as_json(figures: Figures) -> dict[str, Any]:
    return {
        "p50_s": figures.p50_s,
        "p99_s": figures.p99_s,
        "max_s": figures.max_s,
        "wire_bytes": figures.wire_bytes,
        "trimmed_packets": figures.trimmed,
        "algbw_bytes_per_s": figures.algbw,
        "busbw_bytes_per_s": figures.busbw,
        "delivered_frac": figures.delivered,
        "nmse": figures.nmse,
        "rounds": [{"p50_s": r.p50_s, "p99_s": r.p99_s, **asdict(r)} for r in figures.rounds],
    }


def _ratio_as_json(value: Ratio) -> dict[str, Any]:
    low, high = value.spread
    return {"median": value.median, "min": low, "max": high, "by_round": value.by_round}


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:>13.1f}"


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:>13.3f}"


def _spread(value: Ratio) -> str:
    low, high = value.spread
    return f"{value.median:.2f} ({low:.2f}-{high:.2f})"


class TerminalProgress:
    """One line that redraws itself."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream

    def step(self, text: str, done: int, total: int) -> None:
        self._stream.write(f"\r\x1b[K[{done}/{total}] {text}")
        if done == total:
            self.clear()
        self._stream.flush()

    def clear(self) -> None:
        """Remove the line, so that a row can be printed in its place."""
        self._stream.write("\r\x1b[K")
        self._stream.flush()


class PlainProgress:
    """One line for a log when a number of ranks begins. The rows show the rest."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream

    def step(self, text: str, done: int, total: int) -> None:
        if done == 0:
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        pass
