"""How every rank stands with the group: on time, late, slow, stuck or dead; since when, and what it has cost.

Owns what lasts longer than one op. The verdicts on single ops are made in straggler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailcut.mirror import Link
from tailcut.policy.straggler import is_dropped
from tailcut.report import Report
from tailcut.stats import ON_TIME_STANDING, Standing, StandingName

STUCK_PERIODS = 3.0
"""A rank that enters no op for this many times the usual time between two ops of a bucket is stuck: one that
is slow or busy for a moment enters its next op sooner."""


@dataclass
class _Rank:
    """What is known of one rank."""

    standing: Standing = ON_TIME_STANDING
    began_s: float = 0.0  # of the present standing
    away: bool = False  # it was stuck or dead, and has not been on time since
    entered: int = 0  # ops, as far as is known
    entered_at_s: float = 0.0  # when that was news


class Standings:
    """Of the members of a group, seen from one of them. Pure: no clock."""

    def __init__(self, members: int, slow_share: float) -> None:
        self._slow_share = slow_share
        self._ranks = [_Rank() for _ in range(members)]
        self._now_s = 0.0

    @property
    def standings(self) -> tuple[Standing, ...]:
        """By member, as of the latest op."""
        return tuple(
            rank.standing._replace(for_s=self._now_s - rank.began_s)
            if rank.standing.since_op is not None
            else rank.standing
            for rank in self._ranks
        )

    def after(
        self, report: Report, now_s: float, *, period_s: float, usual_s: float, drop_share: Sequence[float]
    ) -> None:
        """An op has ended at ``now_s``. Ops of a bucket usually follow each other after ``period_s``, SCATTER
        usually takes ``usual_s``, and ``drop_share`` is that of the contributions that were not used."""
        self._now_s = now_s
        unused = [place for place, link in enumerate(report.links) if is_dropped(link)]
        waited_s = _waited_s(report, usual_s) / max(1, len(unused))
        for place, link in enumerate(report.links):
            rank = self._ranks[place]
            entered = report.seq + 1 - link.behind_ops
            if entered > rank.entered:
                rank.entered, rank.entered_at_s = entered, now_s
            name = self._name(link, now_s - rank.entered_at_s, period_s, drop_share[place])
            self._note(rank, name, report.seq, now_s)
            if place in unused:
                rank.standing = rank.standing._replace(
                    unused_ops=rank.standing.unused_ops + 1, waited_s=rank.standing.waited_s + waited_s
                )

    def _name(self, link: Link, idle_s: float, period_s: float, drop_share: float) -> StandingName:
        if link.silent:
            return "dead"
        if not is_dropped(link):
            return "on time"
        if period_s > 0 and idle_s > STUCK_PERIODS * period_s:
            return "stuck"
        return "slow" if drop_share > self._slow_share else "late"

    def _note(self, rank: _Rank, name: StandingName, seq: int, now_s: float) -> None:
        before = rank.standing
        if before.name == name:
            return
        rank.away |= name in ("stuck", "dead")
        back = name == "on time" and rank.away
        rank.away &= not back
        rank.standing = before._replace(
            name=name, since_op=None if name == "on time" else seq, returns=before.returns + back
        )
        rank.began_s = now_s


def _waited_s(report: Report, usual_s: float) -> float:
    """How much longer than usual SCATTER has waited for who did not come."""
    if report.scatter.ended_by not in ("absent", "bound", "deadline"):
        return 0.0
    return max(0.0, (report.scatter.took_s or 0.0) - usual_s)
