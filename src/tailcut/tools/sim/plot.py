"""Draws the distribution of completion times. Only this module imports matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tailcut.errors import ConfigError
from tailcut.tools.sim.options import Options
from tailcut.tools.sim.run import Row

SUFFIXES = (".svg", ".png", ".pdf")


def check(path: Path) -> None:
    """Raise ConfigError before the simulation if the picture cannot be made."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"cannot draw {path}: its name must end in {', '.join(SUFFIXES)}")
    _pyplot()


def draw_cdf(path: Path, options: Options, rows: list[Row]) -> None:
    """Draw the share of ops that took longer, for every side and number of ranks, so that tails are seen."""
    figure, axes = new_axes()
    for row in rows:
        for name, side in row.sides.items():
            times = np.sort(side.times_s)
            if not len(times):
                continue
            longer = 1 - np.arange(len(times)) / (len(times) + side.unfinished)
            axes.step(1e3 * times, longer, where="post", label=f"{name}, {row.ranks} ranks")
    axes.set(
        yscale="log",
        xscale="log",
        xlabel="completion time of an op at a rank (ms)",
        ylabel="share of ops that took longer",
        title=f"{options.scenario.name}, {options.size_bytes / 1e6:.4g} MB",
    )
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path)


def new_axes() -> tuple[Any, Any]:
    """A figure and its axes. Its size fits a page of the documentation."""
    figure, axes = _pyplot().subplots(figsize=(7, 4.2), layout="constrained")
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write the picture. The same figures give the same file, so that it changes only when they do."""
    pyplot = _pyplot()
    with pyplot.rc_context({"svg.hashsalt": "tailcut"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        try:
            figure.savefig(path, metadata=metadata)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        finally:
            pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'tailcut[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
