"""Reports as a rank would get them, from a small model of an op: who enters when, how long packets take."""

from __future__ import annotations

from collections.abc import Sequence

from tailcut.mirror import Ending, LateCompletion, Link, LinkStage, Stage, StageReport
from tailcut.policy.deadline import fixed
from tailcut.report import Report
from tailcut.stats import OpBounds

NEVER = 1e9
COORDS = PACKETS = 1000
"""Of every shard, and sent over every link in either direction."""


def op(
    needs_s: Sequence[float],
    /,
    *,
    gather_s: Sequence[float] | None = None,
    entered_s: Sequence[float] | None = None,
    bounds: OpBounds | None = None,
    seq: int = 0,
    length: int = 1000,
    silent: Sequence[int] = (),
    unawaited: Sequence[int] = (),
    abstained: Sequence[int] = (),
    majority_entered_s: float | None = None,
    closed_s: float | None = None,
    scatter_ended_by: Ending | None = None,
    gather_ended_by: Ending | None = None,
    scatter_lost: Sequence[float] | None = None,
    gather_lost: Sequence[float] | None = None,
    scatter_last_s: Sequence[float | None] | None = None,
    sent_lost: Sequence[float] = (),
    received_lost: Sequence[float] = (),
    late: tuple[LateCompletion, ...] = (),
) -> Report:
    """The report of rank 0, which enters at the time 0.

    Ranks in ``unawaited`` are not waited for in SCATTER.
    Rank r's contribution needs ``needs_s[r]`` from its entry, its mean ``gather_s[r]`` from the close; NEVER:
    a rank that is not there. Arguments from ``majority_entered_s`` on override what follows from the model.
    """
    ranks = len(needs_s)
    entered = [0.0, *(entered_s or [0.0] * ranks)[1:]]
    bounds = bounds or fixed(10.0)
    majority_s = sorted(entered)[(ranks + 1) // 2 - 1]
    came_s = [0.0, *(e + s for e, s in zip(entered[1:], needs_s[1:], strict=True))]
    awaited_s = [0.0 if rank in unawaited else t for rank, t in enumerate(came_s)]
    close_s, scatter_by = _end(awaited_s, majority_s, bounds.scatter_s, bounds.scatter_grace_s, silent)
    start_s = max(0.0, close_s)
    means_s = [start_s, *(start_s + s for s in (gather_s or needs_s)[1:])]
    ended_s, gather_by = _end(means_s, start_s, bounds.gather_s, bounds.gather_grace_s, silent)
    if scatter_lost is None:
        scatter_lost = [float(t > close_s) for t in came_s]
    if gather_lost is None:
        gather_lost = [float(t > ended_s) for t in means_s]
    if scatter_last_s is None:
        scatter_last_s = [None, *(None if t > close_s else t for t in came_s[1:])]
    gather_last_s = [None, *(None if t > ended_s else t for t in means_s[1:])]
    scatter = [_came(share, last_s) for share, last_s in zip(scatter_lost, scatter_last_s, strict=True)]
    gather = [_came(share, last_s) for share, last_s in zip(gather_lost, gather_last_s, strict=True)]
    sent_lost_packets = [round(PACKETS * share) for share in sent_lost or [0.0] * ranks]
    received_lost_packets = [round(PACKETS * share) for share in received_lost or [0.0] * ranks]
    if closed_s is None:
        closed_s = close_s
    scatter_by, gather_by = scatter_ended_by or scatter_by, gather_ended_by or gather_by
    return Report(
        seq=seq,
        status="complete" if gather_by == "all" else "partial",
        length=length,
        elapsed_s=ended_s,
        lost_frac=sum(gather_lost) / ranks,
        scatter=_stage(
            scatter, scatter_by, majority_s if majority_entered_s is None else majority_entered_s, closed_s
        ),
        gather=_stage(gather, gather_by, max(0.0, closed_s), ended_s),
        links=tuple(
            Link(
                entered_s=None if entered[rank] > close_s else entered[rank],
                silent=rank in silent,
                abstained=rank in abstained,
                scatter=scatter[rank],
                gather=gather[rank],
                sent_packets=PACKETS,
                sent_lost_packets=sent_lost_packets[rank],
                received_packets=PACKETS - received_lost_packets[rank],
                received_lost_packets=received_lost_packets[rank],
                awaited=rank not in unawaited,
            )
            for rank in range(ranks)
        ),
        late=late,
    )


def links(
    ranks: int = 0, *, scatter_lost: Sequence[float] = (), gather_lost: Sequence[float] = ()
) -> tuple[Link, ...]:
    """Of as many ranks as there are shares of what they did not bring."""
    ranks = ranks or len(scatter_lost or gather_lost)
    nothing = [0.0] * ranks
    shares = zip(scatter_lost or nothing, gather_lost or nothing, strict=True)
    return tuple(Link(0.0, scatter=_came(s, 0.0), gather=_came(g, 0.0)) for s, g in shares)


def lost(report: Report, stage: Stage) -> tuple[float, ...]:
    """By member: the share that it did not bring in time."""
    return tuple(getattr(link, stage).lost_frac for link in report.links)


def empty(report: Report) -> tuple[float, ...]:
    """By member: the share of its mean that came EMPTY."""
    return tuple(link.gather.empty_frac for link in report.links)


def silent(report: Report) -> tuple[int, ...]:
    return tuple(rank for rank, link in zip(report.members, report.links, strict=True) if link.silent)


def abstained(report: Report) -> tuple[int, ...]:
    return tuple(rank for rank, link in zip(report.members, report.links, strict=True) if link.abstained)


def _came(lost_share: float, last_s: float | None) -> LinkStage:
    return LinkStage(COORDS, round(COORDS * lost_share), 0, last_s)


def _stage(came: Sequence[LinkStage], ended_by: Ending, began_s: float, ended_s: float) -> StageReport:
    missing = sum(link.missing for link in came)
    return StageReport(0, ended_by, began_s, ended_s, COORDS * len(came), missing)


def _end(
    came_s: Sequence[float], start_s: float, bound_s: float, grace_s: float, silent: Sequence[int]
) -> tuple[float, Ending]:
    bound_at_s = start_s + bound_s
    if max(came_s) <= bound_at_s:
        return max(came_s), "all"
    heard_s = max(t for rank, t in enumerate(came_s) if rank not in silent)
    return (heard_s + grace_s, "grace") if heard_s + grace_s < bound_at_s else (bound_at_s, "bound")
