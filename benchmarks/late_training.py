"""What does carrying do to training? Losses with late parts carried, discarded, and with nothing late.

Eight replicas are trained in virtual time by the real core (replicas.py). The figures do not depend on
the machine: they contain no clock. The defaults give the table of docs/late.md in about two minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from replicas import Outcome, Training, one_op_late, ops_late

DEFAULT_LR = Training.lr
SHARES = (0.15, 0.4, 0.7)
KINDS: dict[str, Callable[..., Training]] = {"about one": one_op_late, "one to eight": ops_late}


def spread(values: list[float], form: str) -> str:
    """Mean and (min-max)."""
    return f"{np.mean(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def row(name: str, ops: str, late: str, outcomes: list[Outcome], clean: list[Outcome]) -> dict[str, Any]:
    """Prints a row; returns its figures, by seed."""
    figures: dict[str, Any] = {
        "loss": [outcome.loss for outcome in outcomes],
        "loss_ratio": [outcome.loss / first.loss for outcome, first in zip(outcomes, clean, strict=True)],
        "accuracy": [outcome.accuracy for outcome in outcomes],
        "growth": [outcome.growth for outcome in outcomes],
        "drift": [max(outcome.drift) for outcome in outcomes],
        "late_contributions": [outcome.late_contributions for outcome in outcomes],
        "late_means": [outcome.late_means for outcome in outcomes],
        "ops_late": np.mean([_mean_age(outcome.ops_late) for outcome in outcomes]),
    }
    ratio = np.sum(figures["loss"]) / sum(first.loss for first in clean)
    cells = (
        f"{100 * np.mean(figures['late_contributions']):.0f} %",
        f"{figures['ops_late']:.1f}" if late == "carry" else "-",
        spread(figures["loss"], ".4f"),
        f"{ratio:.2f}",
        f"{100 * np.mean(figures['accuracy']):.1f} %",
        f"{np.mean(figures['growth']):.2f}",
        f"{np.max(figures['drift']):.0e}",
    )
    print(f"{name:<10}{ops:<14}{late:<9}" + line(cells), flush=True)
    return {"late": late, "share": name, "ops": ops, **figures}


WIDTHS = (11, 10, 26, 8, 10, 8, 8)
COLUMNS = ("measured", "mean age", "loss", "ratio", "accuracy", "growth", "drift")


def line(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def _mean_age(shares: list[float]) -> float:
    return float(np.dot(shares, np.arange(1, len(shares) + 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, metavar="N")
    parser.add_argument(
        "--lr", type=float, default=DEFAULT_LR, help="a larger one leaves less room for what is late"
    )
    parser.add_argument("--codec", choices=("raw", "planes"), default="raw")
    parser.add_argument("--planes", type=int, default=4, help="bits of a coordinate with --codec planes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures of every seed")
    arguments = parser.parse_args()
    planes = arguments.planes if arguments.codec == "planes" else 16

    def run(kind: Callable[..., Training], share: float, late: str) -> list[Outcome]:
        return [
            replace(
                kind(share, seed=seed, late=late, codec=arguments.codec, planes=planes), lr=arguments.lr
            ).run(record=True)
            for seed in range(1, arguments.seeds + 1)
        ]

    print(f"{'late':<10}{'ops late':<14}{'':<9}" + line(COLUMNS))
    clean = run(one_op_late, 0.0, "carry")
    rows = [row("nothing", "", "", clean, clean)]
    for ops, kind in KINDS.items():
        for share in SHARES:
            for late in ("carry", "discard"):
                rows.append(row(f"{100 * share:.0f} %", ops, late, run(kind, share, late), clean))
    if arguments.json:
        options = {**vars(arguments), "json": str(arguments.json)}
        arguments.json.write_text(json.dumps({"options": options, "rows": rows}))


if __name__ == "__main__":
    main()
