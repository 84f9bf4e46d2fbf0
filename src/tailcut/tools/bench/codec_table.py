"""Shows a run of the codec's benchmark: as a table for a person, or as JSON for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tailcut.tools.bench.codec import CodecOptions, Step


def header() -> str:
    """The lines above the first row."""
    columns = f"{'step':>10}{'planes':>8}{'time':>12}{'of memcpy':>12}{'size':>14}{'NMSE':>12}"
    units = f"{'':>10}{'':>8}{'(ns/coord)':>12}{'(multiple)':>12}{'(bytes/coord)':>14}"
    return f"{columns}\n{units}"


def line(step: Step) -> str:
    """One row."""
    planes = "" if step.planes is None else str(step.planes)
    size = "" if step.bytes_per_coordinate is None else f"{step.bytes_per_coordinate:.3f}"
    error = "" if step.nmse is None else f"{step.nmse:.3g}"
    times = f"{step.ns:>12.3f}{step.memcpy_multiple:>12.2f}"
    return f"{step.name:>10}{planes:>8}{times}{size:>14}{error:>12}".rstrip()


def as_json(options: CodecOptions, machine: dict[str, Any], steps: Sequence[Step]) -> dict[str, Any]:
    """A whole run."""
    return {
        "benchmark": "codec",
        "options": {**asdict(options), "count": options.count},
        "machine": machine,
        "rows": [asdict(step) for step in steps],
    }
