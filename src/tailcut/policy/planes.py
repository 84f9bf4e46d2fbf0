"""How many planes to send: the number that makes (time per step) × (1 + ε) least within the budget.

Owns the trial in which the time of a plane is measured, and the choice. One choice serves all size classes:
per coordinate, a plane costs the same time and the same error in all of them (docs/budget.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median
from typing import NamedTuple, Protocol

from tailcut.epsilon import predicted
from tailcut.policy.budget import RECENT_OPS, Spending
from tailcut.report import Report

MOST_PLANES = 16

FIRST_STEPS = 12
"""Steps with few planes at the start. Half of them are ignored: paths still find their rates."""

TRIAL_STEPS = 8
"""Steps in a row with the same planes, which are timed."""

CLEAR, CLEAR_STEPS = 1.1, 3
"""A trial ends early when CLEAR_STEPS steps with more planes have all been CLEAR times slower than those with
few."""

SETTLING_STEPS = 2
"""The first of these steps are ignored: ops from before are still in flight."""

REVIEW_STEPS = 250
"""The choice is reviewed this often: correlations between ranks change during a training."""

WORTH = 0.02
"""A review changes the choice only if that saves at least this share of a step."""

OTHER_PACE = 1.5
"""Steps that are this many times slower or faster than when the choice was made call for a new trial."""

TRIAL_EVERY_STEPS = 1000
"""A new trial begins no sooner than this after the last one."""

LEAST_ROOM = 0.25
"""Planes may spend at least this share of the budget, whatever the network loses: sending all planes would
not make up for the loss."""

NEAR = 0.95
"""Fewer planes than now must fit into this share of the room: ε is an estimate, and the choice must not
waver."""

MOST_BIAS = 2.0
"""Largest ratio between ε as measured and as predicted. Single ops deviate by more when gradients are
spikes."""

TRIMMED_SHARE = 0.2
"""If trimming costs more than this share of the budget, packets are made so short that a trimming switch
leaves them whole."""


class Planes(NamedTuple):
    """Bits per coordinate in each stage."""

    scatter: int
    gather: int

    def __str__(self) -> str:
        return f"{self.scatter}/{self.gather}"


ALL = Planes(MOST_PLANES, MOST_PLANES)


class PlanesPolicy(Protocol):
    """What decides the planes of a rank's ops."""

    @property
    def choice(self) -> Planes: ...

    @property
    def whole(self) -> bool:
        """Whether packets are so short that trimming leaves them whole."""

    def after(self, report: Report, spending: Spending, now_s: float) -> None: ...

    def describe(self) -> str:
        """What ops begin with, in words."""

    def take_news(self) -> list[str]:
        """What was chosen since the last call, and why."""


class FixedPlanes:
    """The number of planes that the user wants; 0 is raw."""

    whole = False

    def __init__(self, planes: int) -> None:
        self.choice = Planes(planes, planes)

    def after(self, report: Report, spending: Spending, now_s: float) -> None:
        """Nothing is learned."""

    def describe(self) -> str:
        return f"{self.choice.scatter} planes"

    def take_news(self) -> list[str]:
        return []


class _Clock:
    """Measures the time of steps from one entry of the longest bucket to the next."""

    def __init__(self) -> None:
        self._lead: Hashable = None
        self._length = 0
        self._others: set[Hashable] = set()  # keys seen since the lead was last seen
        self._entered_s: float | None = None

    @property
    def ticks(self) -> bool:
        """Whether there are steps at all."""
        return self._entered_s is not None

    def step_s(self, report: Report, entered_s: float) -> float | None:
        """The time of the step that ends with this op's entry; None if the op is of another bucket."""
        if report.key != self._lead:
            # A second op of another bucket before the lead came again: DDP has rebuilt its buckets.
            if report.length <= self._length and report.key not in self._others:
                self._others.add(report.key)
                return None
            self._lead, self._length, self._entered_s = report.key, report.length, None
        self._others.clear()
        before_s, self._entered_s = self._entered_s, entered_s
        return None if before_s is None else entered_s - before_s


class _Part(NamedTuple):
    """A part of a trial: steps in a row with the same planes."""

    planes: Planes
    steps: int
    unseen: int
    """Steps at the start that are ignored: paths find their rates, and ops from before are in flight."""


class AdaptivePlanes:
    """Starts with the fewest planes within the budget. Ops with a key mark steps, which are timed. In a trial
    few planes take turns with more, and the cost of a plane decides. Without keys the fewest planes stay."""

    def __init__(self, ranks: int, budget: float, *, trimmable: bool = True) -> None:
        self._ranks = ranks
        self._trimmable = trimmable  # whether it is known what a trimming switch leaves
        self._budget = self._room = budget
        self._correlation = 0.0
        self._bias = 1.0  # measured ε over predicted ε
        self._clock = _Clock()
        self._few = self.choice = self._fewest(ALL)
        self.whole = False
        self._compared = ALL  # what few planes were compared with
        self._step_s: dict[Planes, float] = {}  # by planes: the step's time in the latest trial
        self._parts = [
            _Part(self._few, FIRST_STEPS, FIRST_STEPS // 2),
            *self._turns(Planes(*(min(MOST_PLANES, 2 * b) for b in self._few)), ALL, self._few, ALL),
        ]
        self._times_s: list[float] = []  # of the steps of the current part
        self._latest_s: deque[float] = deque(maxlen=2 * TRIAL_STEPS)
        self._steps_since_trial = 0  # steps since the last trial
        self._usual_s = 0.0
        self._news: list[str] = []

    def after(self, report: Report, spending: Spending, now_s: float) -> None:
        """Learn from an op that ended at ``now_s``."""
        if report.status == "behind" or report.non_finite or not report.scatter.planes:
            return
        self._learn(report, spending)
        trimmed = spending.recent.trimmed > TRIMMED_SHARE * self._budget
        if trimmed and self._trimmable and not self.whole:
            self.whole = True
            self._news.append(
                "packets are trimmed: from now on they are so short that this does nothing to them"
            )
            self._try_again()
        step_s = self._clock.step_s(report, now_s - report.elapsed_s) if report.key is not None else None
        if step_s is not None:
            self._after_step(step_s)
        if spending.over and not self._in_trial and self._error(self.choice) > self._room:
            self._choose(self._best(), "ε was over the budget")

    def describe(self) -> str:
        return (
            f"{self.choice.scatter} planes for contributions and {self.choice.gather} for means, the fewest "
            f"in a budget of {self._budget:.1%}, then as many as make steps shortest"
        )

    def take_news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    @property
    def _in_trial(self) -> bool:
        return bool(self._parts) and self._clock.ticks

    def _learn(self, report: Report, spending: Spending) -> None:
        weight = 1 / RECENT_OPS
        self._correlation += weight * (report.correlation - self._correlation)
        expected = predicted(self._ranks, report.correlation, report.scatter.planes, report.gather.planes)
        bias = min(MOST_BIAS, max(1 / MOST_BIAS, report.epsilon.quantized / expected))
        self._bias += weight * (bias - self._bias)
        # Taken over all ops, because a burst of losses is over before more planes would help.
        total = spending.total
        spent = total.lost + total.late + total.trimmed
        self._room = max(LEAST_ROOM * self._budget, self._budget - spent)

    def _after_step(self, step_s: float) -> None:
        self._latest_s.append(step_s)
        if self._parts:
            self._after_trial_step(step_s)
            return
        self._steps_since_trial += 1
        usual_s = median(self._latest_s)
        if self._steps_since_trial == self._latest_s.maxlen:
            self._usual_s = usual_s
        if self._steps_since_trial % REVIEW_STEPS == 0:
            self._review()
        if (
            self._steps_since_trial >= TRIAL_EVERY_STEPS
            and not 1 / OTHER_PACE < usual_s / self._usual_s < OTHER_PACE
        ):
            self._try_again()

    def _try_again(self) -> None:
        self._step_s.clear()
        self._few = self.choice = self._fewest(self.choice)
        self._parts, self._times_s = self._turns(self._few, ALL), []

    def _after_trial_step(self, step_s: float) -> None:
        part = self._parts[0]
        self._times_s.append(step_s)
        timed_s = self._times_s[part.unseen :]
        few_s = self._step_s.get(self._few, float("inf"))
        clear = len(timed_s) >= CLEAR_STEPS and part.planes != self._few and min(timed_s) > CLEAR * few_s
        if len(self._times_s) < part.steps and not clear:
            return
        self._step_s[part.planes] = min(median(timed_s), self._step_s.get(part.planes, float("inf")))
        if part.planes != self._few:
            self._compared = part.planes
        self._parts, self._times_s = [] if clear else self._parts[1:], []
        if self._parts:
            self.choice = self._parts[0].planes
            return
        self._steps_since_trial = 0
        self._choose(self._best(), "")

    def _turns(self, *turns: Planes) -> list[_Part]:
        return [_Part(planes, TRIAL_STEPS, SETTLING_STEPS) for planes in turns]

    def _review(self) -> None:
        best = self._best()
        if self._cost_s(best) < (1 - WORTH) * self._cost_s(self.choice):
            self._choose(best, "correlations between ranks have changed")

    def _choose(self, planes: Planes, why: str) -> None:
        if planes == self.choice and why:
            return
        self.choice = planes
        if self._timed:
            few_ms, more_ms = 1e3 * self._step_s[self._few], 1e3 * self._step_s[self._compared]
            timed = f"{few_ms:.3g} ms with {self._few} planes, {more_ms:.3g} ms with {self._compared}"
            why = why or f"a step took {timed}"
        self._news.append(
            f"{planes.scatter} planes for contributions and {planes.gather} for means, ε about "
            f"{self._error(planes):.1%} (budget {self._budget:.1%})" + (f": {why}" if why else "")
        )

    @property
    def _timed(self) -> bool:
        return self._few != self._compared and {self._few, self._compared} <= self._step_s.keys()

    def _best(self) -> Planes:
        return min(
            self._affordable(self.choice), key=lambda planes: (self._cost_s(planes), self._error(planes))
        )

    def _fewest(self, now: Planes) -> Planes:
        return min(self._affordable(now), key=lambda planes: (sum(planes), self._error(planes)))

    def _affordable(self, now: Planes) -> list[Planes]:
        """The choices within the budget. Fewer planes than now must be well within it."""
        pairs = [Planes(s, g) for s in range(1, MOST_PLANES + 1) for g in range(1, MOST_PLANES + 1)]
        return [p for p in pairs if self._error(p) <= self._room * (NEAR if sum(p) < sum(now) else 1)] or [
            ALL
        ]

    def _error(self, planes: Planes) -> float:
        return self._bias * predicted(self._ranks, self._correlation, *planes)

    def _cost_s(self, planes: Planes) -> float:
        """(time per step) × (1 + ε), where the time grows by the same amount with every plane. If the cost of
        a plane is not known, the number of planes."""
        if not self._timed:
            return float(sum(planes))
        few_s, more_s = self._step_s[self._few], self._step_s[self._compared]
        plane_s = max(0.0, more_s - few_s) / (sum(self._compared) - sum(self._few))
        return (few_s + plane_s * (sum(planes) - sum(self._few))) * (1 + self._error(planes))
