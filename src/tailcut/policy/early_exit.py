"""t_C: how long a stage still waits when the last-percentile packets of all ranks have been seen.

What is missing then has been overtaken, is being sent again, or is lost: time for it, by the loss it sees.
"""

from __future__ import annotations

from statistics import median_low

from tailcut.mirror import Ending
from tailcut.policy.deadline import WARM_UP

FIRST_PERCENT = 10
"""Of the average time of the stage. This, the steps and the loss that moves it: OptiReduce."""

MOST_PERCENT = 50
LEAST_PERCENT = 1

LOSS_HIGH = 1e-3
"""Above it the grace doubles. The loss is of what the stage should have brought."""

LOSS_LOW = 1e-4
"""Below it the grace falls by one percent."""

OLD_WEIGHT = 0.95
"""Of the moving average against its next sample: it remembers about 20 ops."""

LEAST_SHARE = 1 / 2000
"""Shortest grace as a share of the deadline (5 ms of 10 s): a packet can be reported lost and sent again."""


class EarlyExit:
    """t_C of one stage in one size class."""

    def __init__(self, least_s: float) -> None:
        self.percent = FIRST_PERCENT
        self.average_s: float | None = None
        """Of the stage's time by the median rank: one straggler does not lengthen it. None in the warm-up."""
        self._least_s = least_s
        self._first_s: list[float] = []

    def grace_s(self, bound_s: float) -> float:
        """At most ``bound_s``, the stage's t_B; exactly that, and so no early exit, in the warm-up."""
        if self.average_s is None:
            return bound_s
        return min(bound_s, max(self._least_s, self.percent / 100 * self.average_s))

    def after(self, took_s: float | None, loss: float, ended_by: Ending) -> None:
        """``took_s``: the median over ranks of when the last of theirs had come; None if not known."""
        if took_s is not None:
            self._average(took_s)
        # A stage that its bound cut has lost nothing to the grace; a longer one would not have helped.
        if ended_by == "grace" and loss > LOSS_HIGH:
            self.percent = min(MOST_PERCENT, 2 * self.percent)
        elif ended_by in ("all", "grace") and loss < LOSS_LOW:
            self.percent = max(LEAST_PERCENT, self.percent - 1)

    def _average(self, took_s: float) -> None:
        if self.average_s is not None:
            self.average_s = OLD_WEIGHT * self.average_s + (1 - OLD_WEIGHT) * took_s
            return
        # The median of the first few: at this weight a slow first op would be remembered for 60 more.
        self._first_s.append(took_s)
        if len(self._first_s) == WARM_UP:
            self.average_s = median_low(self._first_s)
