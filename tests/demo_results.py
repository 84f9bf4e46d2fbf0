"""Progress files of short made-up runs, as ranks leave them, for the tests of tailcut.tools.demo."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tailcut import Config
from tailcut.epsilon import Epsilon
from tailcut.stats import Stats
from tailcut.tools.demo.results import SIDES, Results, Run
from tailcut.tools.race import outcome_of, stream_of
from tailcut.tools.race.progress import ProgressWriter

SECONDS = 20
RANKS = 4
SLOPES = {"gloo": 0.02, "fp16": 0.04, "tailcut": 0.08}
"""How much the figure rises in a second, up to 0.9."""
FACTS = {
    "name": "cnn",
    "source": "Fashion-MNIST",
    "parameters": 1_592_326,
    "batch": 128,
    "figure": "accuracy",
    "higher_is_better": True,
    "target": 0.6,
}


def recorded(
    directory: Path,
    side: str,
    slope: float,
    *,
    seed: int = 0,
    failed: str | None = None,
    facts: dict[str, object] = FACTS,
    seconds: int = SECONDS,
) -> Run:
    """Write what the ranks of a run leave, and read it. With ``failed`` they leave no results."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        progress = ProgressWriter(stream_of(rank, directory))
        if rank == 0:
            progress.say(facts=facts)
        for second in range(1, seconds + 1):
            step_s = (0.5 if second % 7 else 1.2) * 0.02 / slope if slope else 0.5
            progress.say(step=second, at_s=float(second), step_s=step_s, loss=1.0)
            if rank == 0:
                figure = min(0.9, slope * second) if facts["higher_is_better"] else 3.0 - slope * second
                spent = {"spent": 0.03, "budget": 0.05, "lost_frac": 0.0} if side == "tailcut" else {}
                progress.say(step=second, at_s=float(second), figure=figure, **spent)
        progress.close()
        if not failed:
            (directory / f"{rank}.json").write_text(json.dumps(_result(side, rank)))
    return Run(side, seed, outcome_of(directory, list(range(RANKS)), failed))


def _result(side: str, rank: int) -> dict[str, object]:
    result: dict[str, object] = {"parameters": "same"} | ({"figure": 0.87} if rank == 0 else {})
    if side == "tailcut":
        stats = Stats(ops=20, epsilon=Epsilon(0.02, 0.0, 0.004, 0.006), budget=0.05, drift=0.0012)
        late = {"contributions": 1000, "late_contributions": 10 * rank, "means": 1000, "late_means": 7}
        links = dict.fromkeys(range(RANKS), late)
        result |= {
            "stats": stats.to_dict(),
            "stats_text": str(stats),
            "links": links,
            "config": asdict(Config()),
        }
    return result


def results(directory: Path, seeds: int = 1, **failed: str) -> Results:
    """All sides; those that are named have failed for that reason."""
    runs = [
        recorded(directory / f"{side}-{seed}", side, SLOPES[side], seed=seed, failed=failed.get(side))
        for seed in range(seeds)
        for side in SIDES
    ]
    return Results(runs, SECONDS)
