"""Decides the terms of every op from the reports of earlier ops. One object serves all ops of a rank.

Owns the learned bounds of every size, the advertised incast and the verdicts. Ranks need not come to
the same values, because bounds limit only a rank's own waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from tailcut import _native
from tailcut.mirror import Ending, Link, Stage, StageReport
from tailcut.policy.deadline import CALM, DEAF, HURRIED, SHARED, SURE, WINDOW, OpBound, Wait, fixed, to_native
from tailcut.policy.early_exit import LEAST_GRACE_S, EarlyExit
from tailcut.policy.incast import LOSS_LOW, Incast
from tailcut.policy.standing import Standings
from tailcut.policy.straggler import LATE_SHARE, Stragglers, arrivals_s, is_awaited, judge, median_of
from tailcut.report import Report, Verdict, hears_nobody
from tailcut.stats import OpBounds, Standing

MOST_SIZES = 64
"""Sizes of which anything is remembered: those of a program's buckets, with the planes it has used lately."""

DISTURBED = 1 / 8
"""An op that lacks more than this share of its bytes says nothing of how long all of them take. Bounds that
learned from what they had cut would become shorter and shorter."""

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
class _Size:
    """What is known of ops of one size."""

    bound: OpBound
    early_exit: dict[Stage, EarlyExit]
    gather_began_s: dict[int, float]
    """Of the latest ops whose GATHER was cut: when it began, from the entry of the majority."""


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
        one_host: bool = False,
    ) -> None:
        self._members = members
        self._place = members.index(rank)
        self._longest = fixed(deadline_s)
        self._one_host = one_host
        self._sizes: dict[int, _Size] = {}  # the one in use last comes last
        self._periods = Periods()
        self._incast = Incast(len(members))
        self._stragglers = Stragglers(members, straggler_share, whose)
        self._standings = Standings(len(members), straggler_share)
        self._alarms: list[str] = []
        self._step_s = 0.0  # the usual time from an op of a bucket to the next; 0: not known
        self._deaf = False  # its own port was closed in the latest op
        self.hurried = True
        """Set from outside: the budget has room for what is not waited for."""
        self.patient = False
        """Set from outside: the longest bounds hold because recent ops have lacked too much."""

    def native_bounds(self, size: int, *, carried: bool = True) -> _native.Bounds:
        """The bounds of the next op of this size."""
        return to_native(self._longest if self.patient else self.bounds(size, carried=carried))

    @property
    def incast(self) -> int:
        """How many ranks may send to this one at once; 0 is no limit."""
        return self._incast.advertised

    def bounds(self, size: int, *, carried: bool = True) -> OpBounds:
        """The bounds of the next op of this size (``size_of``). ``carried``: what is late comes later."""
        known = self._sizes.get(size) or self._new_size()
        scatter_s, gather_s = self._guess_s(size, known, self._wait(carried))
        return self._longest._replace(
            scatter_s=scatter_s,
            gather_s=gather_s,
            scatter_grace_s=known.early_exit["scatter"].grace_s(scatter_s),
            gather_grace_s=known.early_exit["gather"].grace_s(gather_s),
            absent_s=min(scatter_s, self._absent_s) if carried and self.hurried else 0.0,
        )

    def _wait(self, carried: bool) -> Wait:
        if self._one_host:
            return SHARED
        if not carried:
            return SURE
        return DEAF if self._deaf else HURRIED if self.hurried else CALM

    @property
    def _absent_s(self) -> float:
        """How long those are waited for that enter later than most; 0: as long as others."""
        return max(LEAST_WAIT_S, ABSENT_SHARE * self._step_s) if self._step_s else 0.0

    @property
    def known_bounds(self) -> dict[int, OpBounds]:
        """The bounds of every size in use."""
        return {size: self.bounds(size) for size in sorted(self._sizes)}

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
        return f"{_described(self._longest)}, then little longer than ops usually take"

    def take_alarms(self) -> list[str]:
        """The warnings that the user has not been told yet."""
        alarms, self._alarms = self._alarms, []
        return alarms

    def after(self, report: Report, now_s: float) -> Report:
        """Learn from an op that ended at ``now_s``; called in the order of ending. Returns its report with
        verdicts."""
        if report.status == "behind":
            return report
        self._deaf = hears_nobody(report.links, self._place)
        self._learn_late(report)
        known = self._size(report.size)
        came_s = arrivals_s(report.links, "scatter", self._place)
        usual_s = known.early_exit["scatter"].average_s or 0.0
        self._step_s = period_s = self._periods.after(report.key, now_s - report.elapsed_s)
        slack_s = LATE_SHARE * (period_s or self._longest.deadline_s)
        least_s = max(LEAST_GRACE_S, slack_s)
        report = report.judged(judge(report, self._place, came_s, usual_s, least_s))
        self._alarms += self._stragglers.after(report, report.verdicts)
        self._standings.after(
            report, now_s, period_s=period_s, usual_s=usual_s, drop_share=self._stragglers.drop_share
        )
        self._learn_grace("scatter", report, known, came_s)
        self._learn_grace("gather", report, known, arrivals_s(report.links, "gather", self._place))
        self._learn_bound(report, known)
        self._incast.after(_shared_loss(report))
        return report

    def _size(self, size: int) -> _Size:
        known = self._sizes.pop(size, None) or self._new_size()
        self._sizes[size] = known
        if len(self._sizes) > MOST_SIZES:
            del self._sizes[next(iter(self._sizes))]
        return known

    def _new_size(self) -> _Size:
        return _Size(OpBound(self._longest), {"scatter": EarlyExit(), "gather": EarlyExit()}, {})

    def _guess_s(self, size: int, known: _Size, wait: Wait) -> tuple[float, float]:
        """t_B of both stages. In the warm-up of a size it is a guess from the nearest size that is known."""
        others = {other: theirs for other, theirs in self._sizes.items() if theirs.bound.known}
        if known.bound.known or not others:
            return known.bound.bounds(wait, self._absent_s)
        nearest = min(others, key=lambda other: max(other + 1, size + 1) / min(other + 1, size + 1))
        # An op takes a latency plus a time per byte: twice the bytes take at most twice as long, and fewer
        # bytes need not be faster.
        scale = max(1.0, size / max(1, nearest))
        scatter_s, gather_s = others[nearest].bound.bounds(wait, self._absent_s)
        return min(self._longest.scatter_s, scale * scatter_s), min(self._longest.gather_s, scale * gather_s)

    def _learn_late(self, report: Report) -> None:
        """How long stages of earlier ops have really taken that were cut."""
        for late in report.late:
            for known in self._sizes.values():  # only the size of the op knows its seq
                if late.stage == "scatter":
                    known.bound.scatter.correct(late.seq, late.took_s)
                elif (began_s := known.gather_began_s.pop(late.seq, None)) is not None:
                    known.bound.whole.correct(late.seq, began_s + late.took_s)

    def _learn_bound(self, report: Report, known: _Size) -> None:
        scatter, gather = report.scatter, report.gather
        if self._deaf:
            return  # a closed port says nothing of the network
        start_s = scatter.began_s
        if start_s is None or scatter.ended_s is None or gather.ended_s is None:
            return  # the cap closed it before half of the ranks were there
        others = [link for place, link in enumerate(report.links) if place != self._place and not link.silent]
        awaited = [link for link in others if link.awaited]
        entered_s = [link.entered_s for link in awaited if link.entered_s is not None]
        known.bound.entered(report.seq, max(entered_s, default=start_s) - start_s)
        scatter_cut = scatter.ended_by in _CUT and _loss(scatter, awaited, "scatter") > 0
        gather_cut = gather.ended_by in _CUT and _loss(gather, others, "gather") > 0
        if scatter_cut or _lacking(report.links, "scatter") <= DISTURBED:
            known.bound.scatter.note(report.seq, scatter.ended_s - start_s, cut=scatter_cut)
        if gather_cut or (not scatter_cut and _lacking(report.links, "gather") <= DISTURBED):
            known.bound.whole.note(report.seq, gather.ended_s - start_s, cut=gather_cut)
        if gather_cut and gather.began_s is not None:
            known.gather_began_s[report.seq] = gather.began_s - start_s
            if len(known.gather_began_s) > WINDOW:
                del known.gather_began_s[next(iter(known.gather_began_s))]
        late = sum(bool(link.scatter.missing or link.gather.missing) for link in others)
        most = late == len(others) or 2 * late > len(self._members)
        known.bound.ended(most_late=(scatter_cut or gather_cut) and most)

    def _learn_grace(self, stage: Stage, report: Report, known: _Size, came_s: Sequence[float]) -> None:
        """``came_s`` are the arrivals of the stage."""
        ended: StageReport = getattr(report, stage)
        start_s = ended.began_s
        if start_s is None or ended.took_s is None:
            return
        loss = _loss(ended, [link for link in report.links if is_awaited(link, stage)], stage)
        median_s = max(0.0, median_of(came_s) - start_s) if came_s else None
        known.early_exit[stage].after(median_s, loss, ended.ended_by)


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

    def bounds(self, size: int, *, carried: bool = True) -> OpBounds:
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


def _lacking(links: Sequence[Link], stage: Stage) -> float:
    """The share of all coordinates that did not come, also from ranks that nobody waited for."""
    stages = [getattr(link, stage) for link in links if not (stage == "scatter" and link.abstained)]
    coords = sum(of_link.coords for of_link in stages)
    return sum(of_link.missing for of_link in stages) / coords if coords else 0.0


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
