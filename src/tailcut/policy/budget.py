"""What the ops so far have added to the mean's error, and whether that is within the budget.

Owns ε over ops: smoothed for decisions, and in total for the user. It decides nothing itself.
"""

from __future__ import annotations

from tailcut.epsilon import Epsilon
from tailcut.mirror import LR_PERIOD_OPS, LrScale
from tailcut.report import LR_DIGITS, Report

RECENT_OPS = 20
"""The smoothed ε remembers about this many of the longest buckets; shorter ones weigh less."""

LEAST_OPS = 20
"""Ops before an excess counts: during the first ones, rates and bounds are still being learned."""

EXCESS = 1.1
"""The smoothed ε may reach this many times the budget by chance."""

PERSISTENT_OPS = 100
"""After this many ops in a row over budget, which are no burst, the user's hook is called."""


class Spending:
    """ε of one rank's ops."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.recent = Epsilon()
        """Smoothed over the latest ops."""
        self._sums = Epsilon()  # times the bucket's length
        self._coordinates = 0
        self._longest = 1
        self._ops = 0
        self._ops_over = 0

    def after(self, report: Report) -> None:
        """Count an op that has ended."""
        if report.status == "behind" or report.non_finite or report.length == 0:
            return
        epsilon, length = report.epsilon, report.length
        self._ops += 1
        self._coordinates += length
        self._longest = max(self._longest, length)
        if any(epsilon) or any(self.recent):  # raw ops mostly have none, and this runs in every op
            weight = max(1 / self._ops, 1 / RECENT_OPS) * length / self._longest
            pairs = list(zip(self._sums, self.recent, epsilon, strict=True))
            self._sums = Epsilon(*[total + length * new for total, _, new in pairs])
            self.recent = Epsilon(*[old + weight * (new - old) for _, old, new in pairs])
        self._ops_over = self._ops_over + 1 if self.over else 0

    @property
    def total(self) -> Epsilon:
        """The mean over all ops; long buckets weigh more."""
        return Epsilon(*(part / max(1, self._coordinates) for part in self._sums))

    @property
    def over(self) -> bool:
        """Whether the latest ops have cost more than the budget."""
        return self._ops >= LEAST_OPS and self.recent.total > EXCESS * self.budget

    @property
    def persistent(self) -> bool:
        """Whether they have done so for many ops in a row; once true, it stays so until the excess ends."""
        return self._ops_over >= PERSISTENT_OPS


LR_STEP = 0.005
"""Factors of the learning rate are rounded to this, so that a change is an event and not noise."""

LR_AHEAD_PERIODS = 2
"""A factor is announced this far ahead: 64 to 128 ops, in each of which every rank hears it several times."""

LR_REPEAT_PERIODS = 1 << 12
"""A factor that still holds is announced again after this many periods, because a period has only 16 bits."""

LEAST_LR = 0.05
"""Smaller factors from the network are refused."""

_PERIODS = 1 << 16


class LrOffer:
    """The factor 1/(1 + ε) of the learning rate. Rank 0 announces it ahead of the op from which on it holds.

    Every rank passes on what it has heard, and all ranks change the factor at the same op.
    """

    def __init__(self, *, offers: bool) -> None:
        self._offers = offers
        self.scale = 1.0
        """The factor of the latest op."""
        self.latest: LrScale | None = None

    def after(self, report: Report, recent: Epsilon) -> None:
        """Learn from an op that has ended. ``recent`` is the smoothed ε."""
        if report.status == "behind":
            return
        period = report.seq // LR_PERIOD_OPS
        for heard in (report.lr_scale, *(column.lr_scale for column in report.column)):
            if heard and (self.latest is None or _later(heard.period, self.latest.period)):
                self.latest = heard
        if self.latest is None or not _later(self.latest.period, period):
            self.scale = self.latest.scale if self.latest else 1.0
        if self._offers and report.seq % LR_PERIOD_OPS == 0:
            self._offer(period, 1 / (1 + max(0.0, recent.total)))

    def _offer(self, period: int, factor: float) -> None:
        # There is one announcement at a time, and the next comes a period after this one holds: ranks that
        # are behind must not miss it.
        if self.latest is not None and not _later(period, self.latest.period):
            return
        scale = max(LEAST_LR, round(round(factor / LR_STEP) * LR_STEP, LR_DIGITS))
        old = self.latest is not None and _later(period, (self.latest.period + LR_REPEAT_PERIODS) % _PERIODS)
        if abs(scale - self.scale) > LR_STEP / 2 or old:
            self.latest = LrScale(scale, (period + LR_AHEAD_PERIODS) % _PERIODS)


def _later(period: int, than: int) -> bool:
    return 0 < (period - than) % _PERIODS < _PERIODS // 2
