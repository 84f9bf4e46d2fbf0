"""Decides the terms of every op from the reports of earlier ops. One object serves all ops of a rank.

Owns the learned bounds of every size class, the advertised incast and the verdicts. Ranks need not come to
the same values, because bounds limit only a rank's own waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from tailcut import _native
from tailcut.mirror import Ending, Link, Stage, StageReport
from tailcut.policy.deadline import LEAST_SHARE, StageBound, fixed, to_native
from tailcut.policy.early_exit import LEAST_SHARE as LEAST_GRACE_SHARE
from tailcut.policy.early_exit import EarlyExit
from tailcut.policy.incast import LOSS_LOW, Incast
from tailcut.policy.standing import Standings
from tailcut.policy.straggler import LATE_SHARE, Stragglers, arrivals_s, is_awaited, judge, median_of
from tailcut.report import Report, Verdict
from tailcut.stats import OpBounds, Standing

GUESS_FACTOR = 2.0
"""A size class of which nothing is known yet gets this many times the bounds of another one."""

ABSENT_SHARE = 1 / 4
"""Ranks that have not entered when all others have delivered are waited for this share of a step. One that
evaluates is away for longer. Ranks whose steps vary by a tenth enter apart by a fifth of a step."""

LEAST_WAIT_S = 0.020
"""But at least this long: on a host with more ranks than cores one does not get to run for some
milliseconds."""

_CUT: tuple[Ending, ...] = ("bound", "deadline")

PERIODS = 9
"""How many of the latest times from op to op of a bucket say what is usual."""


@dataclass
class _StagePolicy:
    """One stage in one size class."""

    bound: StageBound
    early_exit: EarlyExit

    def learn(
        self, seq: int, ended_by: Ending, took_s: float, needed_s: float, came_s: float | None, loss: float
    ) -> None:
        """Learn from a stage that ended after ``took_s``. Among ranks that were awaited, the last one was
        done after ``needed_s`` and the median one after ``came_s``; ``loss`` is theirs too."""
        if ended_by == "all":
            self.bound.completed(seq, took_s)
        elif loss > 0 and ended_by in _CUT:
            self.bound.cut(seq, took_s)
        elif came_s is not None:  # everything that was waited for came, except stray packets
            self.bound.completed(seq, needed_s)
        self.early_exit.after(came_s, loss, ended_by)


class Steering:
    """The bounds, the incast and the verdicts of one rank. Pure: no clock, no I/O."""

    def __init__(
        self,
        *,
        rank: int,
        members: Sequence[int],
        deadline_s: float,
        straggler_share: float = 0.2,
        whose: str = "the contribution of rank",
    ) -> None:
        self._members = members
        self._place = members.index(rank)
        self._longest = fixed(deadline_s)
        self._classes: dict[int, dict[Stage, _StagePolicy]] = {}  # by the bit length of an op's size
        self._periods = Periods()
        self._incast = Incast(len(members))
        self._stragglers = Stragglers(members, straggler_share, whose)
        self._standings = Standings(len(members), straggler_share)
        self._alarms: list[str] = []
        self._step_s = 0.0  # the usual time from an op of a bucket to the next; 0: not known
        self.hurried = True
        """Set from outside: the budget has room for contributions that are left out."""
        self.patient = False
        """Set from outside: the longest bounds hold because recent ops have lacked too much."""

    def native_bounds(self, size: int) -> _native.Bounds:
        """The bounds of the next op of this size."""
        return to_native(self._longest if self.patient else self.bounds(size))

    @property
    def incast(self) -> int:
        """How many ranks may send to this one at once; 0 is no limit."""
        return self._incast.advertised

    def bounds(self, size: int) -> OpBounds:
        """The bounds of the next op of this size (``size_of``)."""
        size_class = size.bit_length()
        policies = self._classes.get(size_class) or self._new_class()
        scatter_s = self._bound_s(policies, size_class, "scatter")
        # If t_B closed SCATTER, all bytes of the mean may have to move afterwards: as many as before.
        usual_s = policies["scatter"].early_exit.average_s
        usual_s = scatter_s if usual_s is None else usual_s
        gather_s = max(usual_s, self._bound_s(policies, size_class, "gather"))
        return self._longest._replace(
            scatter_s=scatter_s,
            gather_s=gather_s,
            scatter_grace_s=policies["scatter"].early_exit.grace_s(scatter_s),
            gather_grace_s=policies["gather"].early_exit.grace_s(gather_s),
            absent_s=self._absent_s(scatter_s),
        )

    def _absent_s(self, longest_s: float) -> float:
        """How long ranks are waited for that have not entered; 0: as long as others."""
        if not (self.hurried and self._step_s):
            return 0.0
        return min(longest_s, max(LEAST_WAIT_S, ABSENT_SHARE * self._step_s))

    @property
    def known_bounds(self) -> dict[int, OpBounds]:
        """The bounds of every size class in use, by the class's largest size."""
        sizes = [(1 << size_class) - 1 for size_class in sorted(self._classes)]
        return {size: self.bounds(size) for size in sizes}

    @property
    def drop_share(self) -> tuple[float, ...]:
        """By rank: the share of the latest ops in which its contribution to this rank's shard was not
        used."""
        return self._stragglers.drop_share

    @property
    def verdicts(self) -> tuple[dict[str, int], ...]:
        """By rank: how often each verdict was given."""
        return self._stragglers.counts

    @property
    def standings(self) -> tuple[Standing, ...]:
        """By member: whether it is late, slow, stuck or dead, since when, and what that has cost."""
        return self._standings.standings

    def describe(self) -> str:
        """The derived bounds, in words."""
        least_s = LEAST_SHARE * self._longest.deadline_s
        return f"{_described(self._longest)}, then as long as stages usually take, at least {least_s:g} s"

    def take_alarms(self) -> list[str]:
        """The warnings that the user has not been told yet."""
        alarms, self._alarms = self._alarms, []
        return alarms

    def after(self, report: Report, now_s: float) -> Report:
        """Learn from an op that ended at ``now_s``; called in the order of ending. Returns its report with
        verdicts."""
        if report.status == "behind":
            return report
        for late in report.late:
            for policies in self._classes.values():  # only the class of the op knows its seq
                policies[late.stage].bound.came_late(late.seq, late.took_s)
        came_s = arrivals_s(report.links, "scatter", self._place)
        usual_s = self._policy(report.size, "scatter").early_exit.average_s or 0.0
        self._step_s = period_s = self._periods.after(report.key, now_s - report.elapsed_s)
        slack_s = LATE_SHARE * (period_s or self._longest.deadline_s)
        least_s = max(LEAST_GRACE_SHARE * self._longest.deadline_s, slack_s)
        report = report.judged(judge(report, self._place, came_s, usual_s, least_s))
        self._alarms += self._stragglers.after(report, report.verdicts)
        self._standings.after(
            report, now_s, period_s=period_s, usual_s=usual_s, drop_share=self._stragglers.drop_share
        )
        self._learn("scatter", report, came_s)
        self._learn("gather", report, arrivals_s(report.links, "gather", self._place))
        self._incast.after(_shared_loss(report))
        return report

    def _policy(self, size: int, stage: Stage) -> _StagePolicy:
        size_class = size.bit_length()
        if size_class not in self._classes:
            self._classes[size_class] = self._new_class()
        return self._classes[size_class][stage]

    def _new_class(self) -> dict[Stage, _StagePolicy]:
        deadline_s = self._longest.deadline_s

        def policy(most_s: float) -> _StagePolicy:
            return _StagePolicy(
                StageBound(LEAST_SHARE * deadline_s, most_s), EarlyExit(LEAST_GRACE_SHARE * deadline_s)
            )

        return {"scatter": policy(self._longest.scatter_s), "gather": policy(self._longest.gather_s)}

    def _bound_s(self, policies: dict[Stage, _StagePolicy], size_class: int, stage: Stage) -> float:
        """t_B. In the warm-up of a size class it is a guess from the nearest class that is known."""
        bound = policies[stage].bound
        if bound.known:
            return bound.bound_s
        known = [other for other, theirs in self._classes.items() if theirs[stage].bound.known]
        if not known:
            return bound.bound_s
        nearest = min(known, key=lambda other: (abs(other - size_class), -other))
        # A stage takes a latency plus a time per byte: twice the bytes take at most twice as long, and fewer
        # bytes need not be faster.
        scale = GUESS_FACTOR * (1 << max(0, size_class - nearest))
        return min(bound.bound_s, scale * self._classes[nearest][stage].bound.bound_s)

    def _learn(self, stage: Stage, report: Report, came_s: Sequence[float]) -> None:
        """Learn from one stage of an op. ``came_s`` are the arrivals of the stage."""
        ended: StageReport = getattr(report, stage)
        start_s, took_s = ended.began_s, ended.took_s
        if start_s is None or took_s is None:  # the cap closed it before half of the ranks were there
            return
        own_s = 0.0  # its own contribution came when it entered
        self._policy(report.size, stage).learn(
            report.seq,
            ended.ended_by,
            took_s,
            max(0.0, max(came_s, default=own_s) - start_s, own_s - start_s),
            max(0.0, median_of(came_s) - start_s) if came_s else None,
            _loss(ended, [link for link in report.links if is_awaited(link, stage)], stage),
        )


class Periods:
    """The usual time from an op of a bucket to the next: what a late entry is measured against."""

    def __init__(self) -> None:
        self._entered_s: dict[Hashable, float] = {}  # by key: the latest entry of this rank
        self._latest_s: dict[Hashable, deque[float]] = {}

    def after(self, key: Hashable, entered_s: float) -> float:
        """An op was entered at ``entered_s``. Returns the usual time between two of its key; 0: not known."""
        before_s = self._entered_s.get(key)
        self._entered_s[key] = entered_s
        latest_s = self._latest_s.setdefault(key, deque(maxlen=PERIODS))
        if before_s is not None:
            latest_s.append(entered_s - before_s)
        return median_low(latest_s) if latest_s else 0.0


class FixedSteering(Steering):
    """The longest bounds for every op, without early exit and without a limit of senders. Verdicts are given
    as usual."""

    @property
    def incast(self) -> int:
        return 0

    def bounds(self, size: int) -> OpBounds:
        return self._longest

    def describe(self) -> str:
        return _described(self._longest)


def _described(bounds: OpBounds) -> str:
    return f"bounds of {bounds.scatter_s:g} s for SCATTER and {bounds.gather_s:g} s for GATHER"


def _loss(ended: StageReport, links: Sequence[Link], stage: Stage) -> float:
    """The mean share that is missing, over the ranks that could have brought something."""
    if ended.ended_by == "all":
        return 0.0
    shares = [getattr(link, stage).lost_frac for link in links if not (stage == "scatter" and link.abstained)]
    return sum(shares) / len(shares) if shares else 0.0


def _shared_loss(report: Report) -> float:
    """The share of packets that senders lost on the way to this rank. It is their mean, without the sender
    that lost most and without ranks that were not there to send. Where packets are lost, what senders had not
    brought when a stage was cut counts too. A cut alone does not count: fewer senders do not help against a
    burst of other traffic that fills a port (with it, P99 over P50 under rare, long bursts was 1.7; without,
    it is below 1.2)."""
    if not any(link.received_lost_packets for link in report.links):
        return 0.0
    absent = (Verdict.SILENT, Verdict.COMPUTE_LATE)
    senders = [
        link
        for link, verdict in zip(report.links, report.verdicts, strict=True)
        if not (link.silent or link.abstained or verdict in absent)
    ]

    def shared(lost: Iterable[float]) -> float:
        others = sorted(lost)[:-1]
        return sum(others) / max(1, len(others) - 1)  # one of them is this rank itself, which loses nothing

    loss = shared(link.received_lost_frac for link in senders)
    if loss < LOSS_LOW:
        return loss
    scatter_cut, gather_cut = report.scatter.ended_by in _CUT, report.gather.ended_by in _CUT
    return max(
        loss,
        shared(link.scatter.lost_frac for link in senders) if scatter_cut else 0.0,
        shared(link.gather.lost_frac for link in senders) if gather_cut else 0.0,
    )
