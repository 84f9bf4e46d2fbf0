"""t_C: how long a stage still waits when the last-percentile packets of all ranks have come.

What is missing then was overtaken, is being sent again, or is lost. The grace gives it time, and adapts to
the loss.
"""

from __future__ import annotations

from statistics import median_low

from tailcut.mirror import Ending
from tailcut.policy.deadline import WARM_UP

FIRST_PERCENT = 10
"""The first grace, in percent of the average time of the stage. This value, the steps, and the losses that
change it are OptiReduce's."""

MOST_PERCENT = 50
LEAST_PERCENT = 1

LOSS_HIGH = 1e-3
"""Above this loss the grace doubles. The loss is a share of what the stage should have brought."""

LOSS_LOW = 1e-4
"""Below this loss the grace falls by one percent."""

OLD_WEIGHT = 0.95
"""The weight of the moving average against its next sample: it remembers about 20 ops."""

LEAST_GRACE_S = 0.005
"""The shortest grace: a packet can be reported lost and sent again, also by a host that is busy."""


class EarlyExit:
    """t_C of one stage of ops of one size."""

    def __init__(self) -> None:
        self.percent = FIRST_PERCENT
        self.average_s: float | None = None
        """The average of the stage's time by the median rank, so that one straggler does not lengthen it.
        None in the warm-up."""
        self._first_s: list[float] = []

    def grace_s(self, bound_s: float) -> float:
        """At most ``bound_s``, the stage's t_B. In the warm-up it is exactly that, so there is no early
        exit."""
        if self.average_s is None:
            return bound_s
        return min(bound_s, max(LEAST_GRACE_S, self.percent / 100 * self.average_s))

    def after(self, took_s: float | None, loss: float, ended_by: Ending) -> None:
        """Learn from a stage. ``took_s`` is the median over ranks of when a rank's last packet came; None if
        not known."""
        if took_s is not None:
            self._average(took_s)
        # A stage that its bound cut has lost nothing to the grace, and a longer one would not have helped.
        if ended_by == "grace" and loss > LOSS_HIGH:
            self.percent = min(MOST_PERCENT, 2 * self.percent)
        elif ended_by in ("all", "grace") and loss < LOSS_LOW:
            self.percent = max(LEAST_PERCENT, self.percent - 1)

    def _average(self, took_s: float) -> None:
        if self.average_s is not None:
            self.average_s = OLD_WEIGHT * self.average_s + (1 - OLD_WEIGHT) * took_s
            return
        # The median of the first few is taken: with this weight, a slow first op would be remembered for 60
        # more.
        self._first_s.append(took_s)
        if len(self._first_s) == WARM_UP:
            self.average_s = median_low(self._first_s)
