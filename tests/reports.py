"""Reports as a rank would get them, from a small model of an op: who enters when, how long packets take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailcut.policy.deadline import fixed
from tailcut.report import Ending, Report
from tailcut.stats import OpBounds

NEVER = 1e9


def op(
    scatter_s: Sequence[float],
    /,
    *,
    gather_s: Sequence[float] | None = None,
    entered_s: Sequence[float] | None = None,
    bounds: OpBounds | None = None,
    seq: int = 0,
    length: int = 1000,
    silent: Sequence[int] = (),
    **figures: Any,
) -> Report:
    """The report of rank 0, which enters at the time 0; ``figures`` override those of the model.

    Rank r's contribution needs ``scatter_s[r]`` from its entry, its mean ``gather_s[r]`` from the close;
    NEVER: a rank that is not there.
    """
    ranks = len(scatter_s)
    entered = [0.0, *(entered_s or [0.0] * ranks)[1:]]
    bounds = bounds or fixed(10.0)
    majority_s = sorted(entered)[(ranks + 1) // 2 - 1]
    came_s = [0.0, *(e + s for e, s in zip(entered[1:], scatter_s[1:], strict=True))]
    closed_s, scatter_by = _end(came_s, majority_s, bounds.scatter_s, bounds.scatter_grace_s, silent)
    start_s = max(0.0, closed_s)
    means_s = [start_s, *(start_s + s for s in (gather_s or scatter_s)[1:])]
    ended_s, gather_by = _end(means_s, start_s, bounds.gather_s, bounds.gather_grace_s, silent)
    scatter_lost = tuple(float(t > closed_s) for t in came_s)
    gather_lost = tuple(float(t > ended_s) for t in means_s)
    return Report(
        **{
            "seq": seq,
            "status": "complete" if gather_by == "all" else "deadline",
            "length": length,
            "elapsed_s": ended_s,
            "scatter_lost": scatter_lost,
            "gather_lost": gather_lost,
            "lost_frac": sum(gather_lost) / ranks,
            "scatter_s": closed_s,
            "scatter_ended_by": scatter_by,
            "gather_ended_by": gather_by,
            "entered_s": tuple(None if t > closed_s else t for t in entered),
            "majority_entered_s": majority_s,
            "scatter_last_s": (None, *(None if t > closed_s else t for t in came_s[1:])),
            "gather_last_s": (None, *(None if t > ended_s else t for t in means_s[1:])),
            "silent": tuple(silent),
            "sent_lost": (0.0,) * ranks,
            **figures,
        }
    )


def _end(
    came_s: Sequence[float], start_s: float, bound_s: float, grace_s: float, silent: Sequence[int]
) -> tuple[float, Ending]:
    bound_at_s = start_s + bound_s
    if max(came_s) <= bound_at_s:
        return max(came_s), "all"
    heard_s = max(t for rank, t in enumerate(came_s) if rank not in silent)
    return (heard_s + grace_s, "grace") if heard_s + grace_s < bound_at_s else (bound_at_s, "bound")
