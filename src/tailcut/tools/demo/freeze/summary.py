"""Computes what the freeze cost on each side from the measured steps. Pure functions, no processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tailcut.tools.demo.freeze.digits import TEST_IMAGES
from tailcut.tools.demo.freeze.director import Run, Story
from tailcut.tools.demo.freeze.worker import Script, Step

WARM_STEPS = 5
"""The times leave these first steps out: they touch fresh memory, and DDP rebuilds its buckets."""


@dataclass(frozen=True)
class Phase:
    """A part of the run, with the steps of all ranks except the frozen one."""

    steps: int
    """How many steps it has. A step that several ranks did counts once."""
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True)
class Cost:
    """A run in figures."""

    total_s: float
    """From the first step of the first rank to the last step of the last one."""
    freeze_s: float
    before: Phase
    frozen: Phase
    """The steps that lie within the freeze at least in part."""
    catching_up: Phase
    after: Phase
    done_while_frozen: int
    """How many steps ended within the freeze."""
    behind_steps: int
    """How many steps the frozen rank was behind the others when it was released."""
    skipped_steps: int
    """How many steps the frozen rank did not compute."""
    catch_up_s: float
    """From the release until the frozen rank began a step that another rank had not ended. If it has skipped
    steps before that, until it ended it."""
    partial_steps: int
    """How many steps had an op that the deadline ended, on any of the other ranks."""
    means_lost: tuple[float, ...]
    """By rank: the share of the mean gradients that did not come and counted as zero."""
    contributions_lost: tuple[float, ...]
    """By rank: the share of its gradients that came too late for the mean."""
    accuracy: tuple[float, ...]
    """By rank: the accuracy on the test images, before the resync."""
    drift: tuple[float, ...]
    drift_after_resync: tuple[float, ...]


def cost_of(run: Run, script: Script) -> Cost:
    steps = [replica.steps for replica in run.replicas]
    own = steps[script.frozen_rank]
    others = [of_rank for rank, of_rank in enumerate(steps) if rank != script.frozen_rank]
    catch_up_s = _catch_up_s(own, others, run.released_at_s)
    together_at_s = run.released_at_s + catch_up_s

    def ended(of_rank: list[Step]) -> int:
        return sum(step.ended_s <= run.released_at_s for step in of_rank)

    return Cost(
        total_s=max(r[-1].ended_s for r in steps) - min(r[0].started_s for r in steps),
        freeze_s=run.released_at_s - run.frozen_at_s,
        before=_phase(others, lambda s: s.ended_s <= run.frozen_at_s),
        frozen=_phase(others, lambda s: s.started_s < run.released_at_s and s.ended_s > run.frozen_at_s),
        catching_up=_phase(others, lambda s: run.released_at_s <= s.started_s < together_at_s),
        after=_phase(others, lambda s: s.started_s >= together_at_s),
        done_while_frozen=_phase(others, lambda s: run.frozen_at_s < s.ended_s <= run.released_at_s).steps,
        behind_steps=max(map(ended, others)) - ended(own),
        skipped_steps=own[-1].index + 1 - len(own),
        catch_up_s=catch_up_s,
        partial_steps=_phase(others, lambda s: any(r.status == "partial" for r in s.reports), warm=0).steps,
        means_lost=tuple(map(_means_lost, steps)),
        contributions_lost=tuple(_contributions_lost(steps, rank) for rank in range(script.ranks)),
        accuracy=tuple(replica.accuracy for replica in run.replicas),
        drift=tuple(replica.drift for replica in run.replicas),
        drift_after_resync=tuple(replica.drift_after_resync for replica in run.replicas),
    )


def _phase(ranks: list[list[Step]], inside: Callable[[Step], bool], warm: int = WARM_STEPS) -> Phase:
    chosen = [step for of_rank in ranks for step in of_rank if step.index >= warm and inside(step)]
    if not chosen:
        return Phase(0, 0.0, 0.0, 0.0)
    times_s = [step.ended_s - step.started_s for step in chosen]
    p50_s, p99_s = np.percentile(times_s, (50, 99), method="inverted_cdf")
    return Phase(len({step.index for step in chosen}), float(p50_s), float(p99_s), max(times_s))


def _catch_up_s(own: list[Step], others: list[list[Step]], released_at_s: float) -> float:
    last_ends_s: dict[int, float] = {}
    for step in (step for of_rank in others for step in of_rank):
        last_ends_s[step.index] = max(step.ended_s, last_ends_s.get(step.index, 0.0))
    for before, step in zip([None, *own], own, strict=False):
        last_end_s = last_ends_s[step.index]
        if step.ended_s > released_at_s and step.started_s < last_end_s and last_end_s > released_at_s:
            skipped = before is not None and step.index > before.index + 1
            return max(0.0, (step.ended_s if skipped else step.started_s) - released_at_s)
    return own[-1].ended_s - released_at_s


def _means_lost(steps: list[Step]) -> float:
    reports = [report for step in steps for report in step.reports]
    coordinates = sum(report.length for report in reports)
    return sum(report.lost_frac * report.length for report in reports) / coordinates if coordinates else 0.0


def _contributions_lost(steps: list[list[Step]], rank: int) -> float:
    """Every owner reports on its own shard, and the shards of an op are equal parts."""
    reports = [report for of_rank in steps for step in of_rank for report in step.reports]
    coordinates = sum(report.length for report in reports)
    lost = sum(report.links[rank].scatter.lost_frac * report.length for report in reports)
    return lost / coordinates if coordinates else 0.0


def render(story: Story) -> str:
    """The summary for a person."""
    script = story.script
    tailcut, gloo = cost_of(story.tailcut, script), cost_of(story.gloo, script)
    rank = script.frozen_rank
    return "\n".join(
        [
            f"{'time per step in ms,':<26}{'tailcut':>31}{'Gloo':>31}",
            f"{'on the other ranks':<26}" + 2 * f"{'steps':>7}{'p50':>7}{'p99':>8}{'longest':>9}",
            *(
                f"  {name:<24}{_times(ours)}{_times(theirs)}"
                for name, ours, theirs in (
                    ("before the freeze", tailcut.before, gloo.before),
                    (f"rank {rank} frozen", tailcut.frozen, gloo.frozen),
                    (f"rank {rank} catching up", tailcut.catching_up, gloo.catching_up),
                    ("afterwards", tailcut.after, gloo.after),
                )
            ),
            "",
            *(
                f"{name:<44}{ours:>13}{theirs:>31}".rstrip()
                for name, ours, theirs in _rows(tailcut, gloo, rank)
            ),
            "",
            *_words(tailcut, gloo, script),
        ]
    )


def _times(phase: Phase) -> str:
    if not phase.steps:
        return f"{0:>7}{'–':>7}{'–':>8}{'–':>9}"
    return f"{phase.steps:>7}{1e3 * phase.p50_s:>7.0f}{1e3 * phase.p99_s:>8.0f}{1e3 * phase.max_s:>9.0f}"


def _rows(tailcut: Cost, gloo: Cost, rank: int) -> list[tuple[str, str, str]]:
    def row(name: str, figure: Callable[[Cost], str]) -> tuple[str, str, str]:
        return name, figure(tailcut), figure(gloo)

    return [
        row("", lambda cost: "tailcut" if cost is tailcut else "Gloo"),
        row("training in total", lambda cost: f"{cost.total_s:.1f} s"),
        row("steps done during the freeze", lambda cost: str(cost.done_while_frozen)),
        row(
            f"test accuracy (rank 0; one image is {1 / TEST_IMAGES:.1%})",
            lambda cost: f"{cost.accuracy[0]:.1%}",
        ),
        row("  the lowest of all ranks", lambda cost: f"{min(cost.accuracy):.1%}"),
        row("mean gradients lost, other ranks", lambda cost: f"{_without(cost.means_lost, rank):.2%}"),
        row(f"mean gradients lost, rank {rank}", lambda cost: f"{cost.means_lost[rank]:.2%}"),
        row("gradients too late, other ranks'", lambda c: f"{_without(c.contributions_lost, rank):.2%}"),
        row(f"gradients too late, rank {rank}'s", lambda cost: f"{cost.contributions_lost[rank]:.2%}"),
        row("replicas at the end", lambda cost: _replicas(cost.drift)),
        ("  after attachment.resync()", _replicas(tailcut.drift_after_resync), ""),
    ]


def _without(shares: tuple[float, ...], rank: int) -> float:
    return float(np.mean([share for other, share in enumerate(shares) if other != rank]))


def _replicas(drift: tuple[float, ...]) -> str:
    return "differ" if any(drift) else "equal"


def _words(tailcut: Cost, gloo: Cost, script: Script) -> list[str]:
    rank = script.frozen_rank
    return [
        f"With Gloo everybody stood still for {gloo.frozen.max_s:.2f} s. "
        f"With tailcut no step took longer than {_longest_s(tailcut):.2f} s;",
        f"{tailcut.partial_steps} ended before all had come. At its release rank {rank} was "
        f"{tailcut.behind_steps} steps behind. It took the means",
        f"of {tailcut.skipped_steps} steps without computing them, and was with the others again after "
        f"{tailcut.catch_up_s:.2f} s.",
        *_words_on_drift(tailcut),
        "Both sides ran once, one after the other: tailcut bench is what compares speed.",
    ]


def _words_on_drift(cost: Cost) -> list[str]:
    apart = [f"{drift:.2g} (rank {rank})" for rank, drift in enumerate(cost.drift) if drift]
    if not apart:
        return ["Every rank missed the same parts of the means, so the replicas are equal."]
    return [
        "Ranks that missed different parts of the means have different parameters, until attachment.resync()",
        f"copies rank 0's. Before that their distance from it, over its norm, was {', '.join(apart)}.",
    ]


def _longest_s(cost: Cost) -> float:
    return max(phase.max_s for phase in (cost.before, cost.frozen, cost.catching_up, cost.after))
