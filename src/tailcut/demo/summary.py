"""What the freeze cost, from the ops as they were measured: pure functions, no processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tailcut.demo.director import Story
from tailcut.demo.worker import Op


@dataclass(frozen=True)
class Phase:
    """A part of the run: the ops that the ranks other than the frozen one ended in it."""

    name: str
    ops: int
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True)
class Summary:
    """A story in figures. An op is counted once, however many ranks took part."""

    ops: int
    phases: tuple[Phase, ...]
    freeze_s: float
    """What every rank of a collective that waits would have stood still for."""
    missed_contributions: int
    """Ops in which another owner closed its shard without all that the frozen rank had to give."""
    lost_results: tuple[float, ...]
    """By rank, what was lost of all its results, in results: 1.0 is as much as all of one op."""
    ops_by_rank: tuple[int, ...]
    behind_ops: int
    """Ops that the others had ended and the frozen rank had not, when it was released."""
    skipped_ops: int
    """Ops that it never saw because it was further behind than the window."""
    catch_up_s: float
    """From the release until it entered an op that another rank had not ended yet."""


def summarize(story: Story) -> Summary:
    frozen = story.script.frozen_rank
    others = [ops for rank, ops in enumerate(story.ops) if rank != frozen]
    healthy = [op for ops in others for op in ops]
    catch_up_s = _catch_up_s(story, healthy)
    caught_up_at_s = story.released_at_s + catch_up_s
    return Summary(
        ops=1 + max(op.report.seq for op in healthy),
        phases=(
            _phase("before the freeze", healthy, story.started_at_s, story.frozen_at_s),
            _phase(f"rank {frozen} frozen", healthy, story.frozen_at_s, story.released_at_s),
            _phase(f"rank {frozen} catching up", healthy, story.released_at_s, caught_up_at_s),
            _phase("afterwards", healthy, caught_up_at_s, float("inf")),
        ),
        freeze_s=story.released_at_s - story.frozen_at_s,
        missed_contributions=_count(
            healthy, lambda op: bool(op.report.scatter_lost) and op.report.scatter_lost[frozen] > 0
        ),
        lost_results=tuple(sum(op.report.lost_frac for op in ops) for ops in story.ops),
        ops_by_rank=tuple(len(ops) for ops in story.ops),
        behind_ops=max(_ended(ops, story.released_at_s) for ops in others)
        - _ended(story.ops[frozen], story.released_at_s),
        skipped_ops=sum(op.report.behind_ops for op in story.ops[frozen]),
        catch_up_s=catch_up_s,
    )


def _phase(name: str, healthy: list[Op], from_s: float, until_s: float) -> Phase:
    inside = [op for op in healthy if from_s < op.ended_s <= until_s]
    if not inside:
        return Phase(name, 0, 0.0, 0.0, 0.0)
    times_s = [op.ended_s - op.entered_s for op in inside]
    p50_s, p99_s = np.percentile(times_s, (50, 99), method="inverted_cdf")
    return Phase(name, _count(inside, lambda _: True), float(p50_s), float(p99_s), max(times_s))


def _count(ops: list[Op], matches: Callable[[Op], bool]) -> int:
    return len({op.report.seq for op in ops if matches(op)})


def _ended(ops: list[Op], by_s: float) -> int:
    return sum(op.ended_s <= by_s for op in ops)


def _catch_up_s(story: Story, healthy: list[Op]) -> float:
    last_end_s: dict[int, float] = {}
    for op in healthy:
        last_end_s[op.report.seq] = max(op.ended_s, last_end_s.get(op.report.seq, 0.0))
    own = story.ops[story.script.frozen_rank]
    entered = (op for op in own if op.entered_s > story.released_at_s)
    together = (op.entered_s for op in entered if op.entered_s < last_end_s.get(op.report.seq, 0.0))
    return next(together, own[-1].ended_s) - story.released_at_s


def render(summary: Summary, story: Story) -> str:
    """The summary for a person."""
    script, frozen = story.script, story.script.frozen_rank
    meanwhile = summary.phases[1]
    return "\n".join(
        [
            f"{summary.ops} ops of {4 * script.count / 1e6:.1f} MB on {script.ranks} ranks, deadline "
            f"{1e3 * script.deadline_s:.0f} ms; rank {frozen} was frozen for {summary.freeze_s:.2f} s.",
            "",
            f"{'time per op on the other ranks':<32}{'ops':>6}{'p50':>12}{'p99':>12}{'longest':>12}",
            *map(_phase_row, summary.phases),
            "",
            f"{'lost of the results':<32}{'ops':>6}{'in results':>12}{'share':>12}",
            *(
                f"  {f'rank {rank}':<30}{ops:>6}{lost:>12.2f}{lost / ops:>12.2%}"
                for rank, (lost, ops) in enumerate(
                    zip(summary.lost_results, summary.ops_by_rank, strict=True)
                )
            ),
            "",
            f"{summary.missed_contributions} ops went without rank {frozen}'s contribution or a part of it.",
            f"At its release rank {frozen} was {summary.behind_ops} ops behind; it {_how(summary)}",
            f"and was with the others again after {summary.catch_up_s:.2f} s.",
            f"A collective that waits would have stood still on every rank for {summary.freeze_s:.2f} s;",
            f"here {meanwhile.ops} ops were done meanwhile, the longest in {1e3 * meanwhile.max_s:.0f} ms.",
        ]
    )


def _phase_row(phase: Phase) -> str:
    if not phase.ops:
        return f"  {phase.name:<30}{0:>6}"
    times = "".join(f"{1e3 * t:>9.1f} ms" for t in (phase.p50_s, phase.p99_s, phase.max_s))
    return f"  {phase.name:<30}{phase.ops:>6}{times}"


def _how(summary: Summary) -> str:
    if summary.skipped_ops:
        return f"was past the window, skipped {summary.skipped_ops} ops"
    return "found the results it had missed, op by op,"
