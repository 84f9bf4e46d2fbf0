"""Who was late in an op and why, and which rank is dropped too often.

Verdicts come from the times in one report: when a rank entered, and when its packets came. This module knows
nothing of the other ranks' reports. So two ranks may judge a third differently, as their links to it differ
too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tailcut.mirror import Link, Stage, StageReport
from tailcut.report import Report, Verdict

LATE_SHARE = 0.5
"""A rank is late if it is done so much later than the median rank, as a share of the stage's usual time and
of the usual time between two ops of the bucket: in a healthy run ranks enter apart by more than a short stage
takes."""

LOSSY = 0.01
"""A link that loses more than this share of its packets is lossy: ten times the loss that makes the policies
act."""

STILL_COMING = 0.25
"""A rank whose latest packet came in the last quarter of a stage that was cut was still sending."""

WINDOW = 100
"""The share of dropped contributions is taken over this many ops."""

LEAST_OPS = 20
"""Ops before that share can give a warning."""

DROPPED_FROM = 0.5
"""A contribution that lacks more than this share counts as not used: it is dropped, not damaged."""


def arrivals_s(links: Sequence[Link], stage: Stage, place: int) -> list[float]:
    """When the latest packets of the other ranks came, in ascending order, of those that were awaited."""
    heard = [link for peer, link in enumerate(links) if peer != place and is_awaited(link, stage)]
    return sorted([t for link in heard if (t := getattr(link, stage).last_s) is not None])


def is_awaited(link: Link, stage: Stage) -> bool:
    """Whether the stage waited for what the rank brings: its contribution, or the mean of its shard."""
    return not link.silent and (stage == "gather" or link.awaited)


def is_dropped(link: Link) -> bool:
    """Whether a contribution was expected and not used."""
    return link.scatter.lost_frac > DROPPED_FROM and not link.abstained


def judge(
    report: Report, place: int, came_s: Sequence[float], usual_s: float, least_s: float
) -> tuple[Verdict, ...]:
    """The verdict on every member. ``place`` is this rank's own place, ``came_s`` the arrivals of SCATTER.

    ``usual_s`` is the usual time of SCATTER, for groups of two, which have no median. ``least_s`` is the
    shortest lateness that counts.
    """
    start_s = report.scatter.began_s or 0.0
    if len(came_s) > 1:
        usual_s = max(0.0, median_of(came_s) - start_s)
    slack_s = max(least_s, LATE_SHARE * usual_s)
    late_after_s = start_s + usual_s + slack_s
    complete = not (report.scatter.missing or report.gather.missing)
    prompt = -start_s <= slack_s and (not came_s or came_s[-1] <= late_after_s)
    if complete and prompt and not _trouble(report.links):
        return (Verdict.ON_TIME,) * len(report.links)
    return tuple(
        [
            _verdict(report, link, peer == place, start_s, slack_s, late_after_s)
            for peer, link in enumerate(report.links)
        ]
    )


def median_of(ordered: Sequence[float]) -> float:
    """The median; of an even number the lower one, because the faster half says what is usual."""
    return ordered[(len(ordered) - 1) // 2]


def _trouble(links: Sequence[Link]) -> bool:
    """Whether a rank is silent or a link is lossy."""
    suspects = [link for link in links if link.silent or link.sent_lost_packets or link.received_lost_packets]
    return any(link.silent or max(link.sent_lost_frac, link.received_lost_frac) > LOSSY for link in suspects)


def _verdict(
    report: Report, link: Link, own: bool, start_s: float, slack_s: float, late_after_s: float
) -> Verdict:
    entered_s = 0.0 if own else link.entered_s
    entered_late = entered_s is not None and entered_s - start_s > slack_s
    if own:  # its own contribution is missing only if it came after the close
        return Verdict.COMPUTE_LATE if entered_late or link.scatter.missing else Verdict.ON_TIME
    if link.silent:
        return Verdict.SILENT
    last_s = link.scatter.last_s
    if link.scatter.missing and not link.abstained:
        if entered_s is None:  # nothing of it came; if the rank is alive, its engine still answers
            return Verdict.SILENT if link.gather.lost_frac >= 1 else Verdict.COMPUTE_LATE
        # It entered when half of the stage was over.
        if entered_s - start_s > LATE_SHARE * (report.scatter.took_s or 0.0):
            return Verdict.COMPUTE_LATE
        return _unfinished(report.scatter, last_s, start_s)
    if last_s is not None and last_s > late_after_s:
        by_entry = entered_s is not None and entered_s - start_s >= (last_s - late_after_s + slack_s) / 2
        return Verdict.COMPUTE_LATE if by_entry else Verdict.NETWORK_LATE
    if link.gather.missing:
        return _unfinished(report.gather, link.gather.last_s, report.gather.began_s or 0.0)
    if link.received_lost_frac > LOSSY:
        return Verdict.LOSSY_FROM
    if link.sent_lost_frac > LOSSY:
        return Verdict.LOSSY_TO
    return Verdict.ON_TIME


def _unfinished(stage: StageReport, last_s: float | None, start_s: float) -> Verdict:
    """The verdict on a rank that was on time and some of whose packets are missing: are they late or lost?"""
    end_s = stage.ended_s or 0.0
    if stage.ended_by == "grace":  # its last packets had come, so earlier ones that are missing were lost
        return Verdict.LOSSY_FROM
    if last_s is None or last_s >= end_s - STILL_COMING * (end_s - start_s):
        return Verdict.NETWORK_LATE
    return Verdict.LOSSY_FROM


class Stragglers:
    """Counts of verdicts, and the shares of dropped contributions over the latest ops."""

    def __init__(self, members: Sequence[int], share: float, whose: str = "the contribution of rank") -> None:
        self._members = members
        self._share = share
        self._whose = whose
        self._clean_ops = 0  # ops in which every rank was on time
        # From here on, a rank is its place in the members.
        self._counts: list[dict[Verdict, int]] = [{} for _ in members]
        self._dropped: deque[dict[int, Verdict]] = deque(maxlen=WINDOW)  # by op: the ranks, and why
        self._drops = [0] * len(members)  # by rank, in the window
        self._told: set[int] = set()

    def after(self, report: Report, verdicts: Sequence[Verdict]) -> list[str]:
        """What to tell the user now. Each rank is reported once, and again only after it has recovered."""
        self._count(verdicts)
        dropped = _dropped(report, verdicts) if report.scatter.missing else {}
        if len(self._dropped) == WINDOW:
            for rank in self._dropped[0]:
                self._drops[rank] -= 1
        self._dropped.append(dropped)
        for rank in dropped:
            self._drops[rank] += 1
        self._told = {rank for rank in self._told if self._drop_share(rank) > self._share / 2}
        if len(self._dropped) < LEAST_OPS:
            return []
        news = [r for r in dropped if r not in self._told and self._drop_share(r) > self._share]
        self._told.update(news)
        return [self._alarm(rank) for rank in news]

    @property
    def drop_share(self) -> tuple[float, ...]:
        """By rank: the share of the latest ops in which its contribution to this rank's shard was not
        used."""
        return tuple(self._drop_share(rank) for rank in range(len(self._drops)))

    @property
    def counts(self) -> tuple[dict[str, int], ...]:
        """By rank: how often each verdict was given."""
        return tuple(
            {
                str(v): n + self._clean_ops * (v is Verdict.ON_TIME)
                for v, n in ({Verdict.ON_TIME: 0} | counts).items()
            }
            for counts in self._counts
        )

    def _count(self, verdicts: Sequence[Verdict]) -> None:
        if all(verdict is Verdict.ON_TIME for verdict in verdicts):
            self._clean_ops += 1
            return
        for counts, verdict in zip(self._counts, verdicts, strict=True):
            counts[verdict] = counts.get(verdict, 0) + 1

    def _drop_share(self, rank: int) -> float:
        return self._drops[rank] / max(1, len(self._dropped))

    def _alarm(self, rank: int) -> str:
        why = [dropped[rank] for dropped in self._dropped if rank in dropped]
        verdict = max(set(why), key=why.count)
        return (
            f"tailcut: {self._whose} {self._members[rank]} was not used in {self._drop_share(rank):.0%} of "
            f"the last {len(self._dropped)} ops. Verdict: {verdict}. {_REMEDIES[verdict]}. Told again only "
            "if it recovers and relapses; stats() keeps count"
        )


def _dropped(report: Report, verdicts: Sequence[Verdict]) -> dict[int, Verdict]:
    return {
        place: verdict
        for place, (link, verdict) in enumerate(zip(report.links, verdicts, strict=False))
        if is_dropped(link)
    }


_NETWORK = "`tailcut doctor` shows loss and delay of every link"
_REMEDIES = {
    Verdict.ON_TIME: _NETWORK,
    Verdict.COMPUTE_LATE: "Find what slows its process (input, other jobs on its host), or give it less work",
    Verdict.NETWORK_LATE: f"{_NETWORK}; fewer planes send less",
    Verdict.LOSSY_FROM: _NETWORK,
    Verdict.LOSSY_TO: _NETWORK,
    Verdict.SILENT: "It is dead, frozen or cut off: restart it, or go on without it",
}
