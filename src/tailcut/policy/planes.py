"""How many planes to send: the number that makes (time per step) × (1 + ε) least within the budget.

Owns the trial in which the time of a plane is measured, and the choice. One choice serves all sizes: per
coordinate, a plane costs the same time and the same error in all of them (docs/budget.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol

from tailcut.epsilon import predicted
from tailcut.policy.budget import EXCESS, RECENT_OPS, Spending
from tailcut.report import Report

MOST_PLANES = 16

FIRST_STEPS = 12
"""Steps with few planes at the start. Half of them are ignored: paths still find their rates."""

TRIAL_STEPS = 8
"""Steps in a row with the same planes, which are timed."""

CLEAR, CLEAR_STEPS = 1.1, 3
"""A trial ends early when CLEAR_STEPS steps with more planes have all been CLEAR times slower than those with
few."""

EXPOSED = 1 / 8
"""There is no trial with more planes if steps wait for their last op for this share of their time. Then one
more plane of seven makes a step 1.8 % longer, and saves at most 1.8 % of the rounds."""

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

TRIMMED_PACKETS = 0.01
"""If it is not known what the switch leaves, the same is done as soon as this share of an op's packets came
trimmed: they may lack coordinates, and are sent again then."""


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
    def least_error(self) -> float:
        """ε of the fewest planes that may be sent, for independent gradients."""

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

    def __init__(self, ranks: int, planes: int, *, coding_carried: bool = False) -> None:
        self.choice = Planes(planes, planes)
        self.least_error = (
            predicted(ranks, 0.0, planes, planes, coding_carried=coding_carried) if planes else 0.0
        )

    def after(self, report: Report, spending: Spending, now_s: float) -> None:
        """Nothing is learned."""

    def describe(self) -> str:
        return f"{self.choice.scatter} planes"

    def take_news(self) -> list[str]:
        return []


class _Step(NamedTuple):
    """From one entry of the longest bucket to the next."""

    took_s: float
    waited_s: float
    """From the entry of the last op of a backward pass until all ops were done."""


class _Clock:
    """Measures steps."""

    def __init__(self) -> None:
        self._lead: Hashable = None
        self._length = 0
        self._ops_s: dict[
            Hashable, tuple[float, float]
        ] = {}  # entry and end of the lead, and of all ops since

    @property
    def ticks(self) -> bool:
        """Whether there are steps at all."""
        return bool(self._ops_s)

    def step(self, report: Report, ended_s: float) -> _Step | None:
        """The step that ends with this op's entry; None if the op is of another bucket."""
        entered_s = ended_s - report.elapsed_s
        if report.key != self._lead:
            # A second op of another bucket before the lead came again: DDP has rebuilt its buckets.
            if report.length <= self._length and report.key not in self._ops_s:
                self._ops_s[report.key] = entered_s, ended_s
                return None
            self._lead, self._length, self._ops_s = report.key, report.length, {}
        ops_s, self._ops_s = sorted(self._ops_s.values()), {report.key: (entered_s, ended_s)}
        return _Step(entered_s - ops_s[0][0], _waited_s(ops_s, entered_s)) if ops_s else None


def _waited_s(ops_s: Sequence[tuple[float, float]], next_s: float) -> float:
    """The longest time without an entry is that in which DDP waits, steps and computes forward."""
    entries_s = [entered_s for entered_s, _ in ops_s] + [next_s]
    pause, last = max((after_s - at_s, k) for k, (at_s, after_s) in enumerate(pairwise(entries_s)))
    return min(pause, max(ended_s for _, ended_s in ops_s[: last + 1]) - entries_s[last])


def _wait(steps: Sequence[_Step]) -> str:
    """That steps wait for their ops; empty if they do not. Not by the longest waits: these are for ranks that
    came late."""
    low = sorted(steps, key=lambda step: step.waited_s - EXPOSED * step.took_s)[len(steps) // 4]
    if low.waited_s <= EXPOSED * low.took_s:
        return ""
    return f"a step of {1e3 * low.took_s:.3g} ms waits for them for {1e3 * low.waited_s:.3g} ms"


class _Part(NamedTuple):
    """A part of a trial: steps in a row with the same planes."""

    planes: Planes
    steps: int
    unseen: int
    """Steps at the start that are ignored: paths find their rates, and ops from before are in flight."""


class AdaptivePlanes:
    """Starts with the fewest planes within the budget. Ops with a key mark steps, which are timed. In a trial
    few planes take turns with more, and the cost of a plane decides. Without keys the fewest planes stay."""

    def __init__(
        self, ranks: int, budget: float, *, trimmable: bool = True, coding_carried: bool = False
    ) -> None:
        self._ranks = ranks
        self._coding_carried = coding_carried
        self._trimmable = trimmable  # whether it is known what a trimming switch leaves
        self._budget = self._room = budget
        self._correlation = 0.0
        self._bias = 1.0  # measured ε over predicted ε
        self._clock = _Clock()
        self._few = self.choice = self._fewest(ALL)
        self.least_error = self._error(self._few)
        self.whole = False
        self._compared = ALL  # what few planes were compared with
        self._step_s: dict[Planes, float] = {}  # by planes: the step's time in the latest trial
        self._parts = [
            _Part(self._few, FIRST_STEPS, FIRST_STEPS // 2),
            *self._turns(Planes(*(min(MOST_PLANES, 2 * b) for b in self._few)), ALL, self._few, ALL),
        ]
        self._steps: list[_Step] = []  # of the current part
        self._latest_s: deque[float] = deque(maxlen=2 * TRIAL_STEPS)
        self._steps_since_trial = 0  # steps since the last trial
        self._usual_s = 0.0
        self._news: list[str] = []

    def after(self, report: Report, spending: Spending, now_s: float) -> None:
        """Learn from an op that ended at ``now_s``."""
        if report.status == "behind" or report.non_finite or not report.scatter.planes:
            return
        self._learn(report, spending)
        if not self.whole and self._trimming_costs(report, spending):
            self.whole = True
            self._news.append(
                "packets are trimmed: from now on they are so short that this does nothing to them"
                + ("" if self._trimmable else ", if 256 bytes of a frame are left (trim_bytes says so)")
            )
            self._try_again()
        if report.key is not None and (step := self._clock.step(report, now_s)):
            self._after_step(step)
        if spending.over and not self._in_trial and self._error(self.choice) > self._room:
            self._choose(self._best(), "ε was over the budget")

    def _trimming_costs(self, report: Report, spending: Spending) -> bool:
        if self._trimmable:
            return spending.recent.trimmed > TRIMMED_SHARE * self._budget
        traffic = report.traffic
        return traffic.trimmed_packets > TRIMMED_PACKETS * traffic.received_packets

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
        expected = self._predicted(report.correlation, Planes(report.scatter.planes, report.gather.planes))
        bias = min(MOST_BIAS, max(1 / MOST_BIAS, report.epsilon.quantized / expected))
        self._bias += weight * (bias - self._bias)
        # Taken over all ops, because a burst of losses is over before more planes would help.
        total = spending.total
        left = EXCESS * self._budget - (total.lost + total.late + total.trimmed)
        self._room = min(self._budget, max(LEAST_ROOM * self._budget, left))

    def _after_step(self, step: _Step) -> None:
        self._latest_s.append(step.took_s)
        if self._parts:
            self._after_trial_step(step)
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
        self._parts, self._steps = self._turns(self._few, ALL), []

    def _after_trial_step(self, step: _Step) -> None:
        part = self._parts[0]
        self._steps.append(step)
        timed = self._steps[part.unseen :]
        few_s = self._step_s.get(self._few, float("inf"))
        clear = (
            part.planes != self._few
            and len(timed) >= CLEAR_STEPS
            and min(step.took_s for step in timed) > CLEAR * few_s
        )
        if len(self._steps) < part.steps and not clear:
            return
        took_s = median(step.took_s for step in timed)
        self._step_s[part.planes] = min(took_s, self._step_s.get(part.planes, float("inf")))
        waits = ""
        if part.planes == self._few:
            waits = _wait(timed)
        else:
            self._compared = part.planes
        self._parts, self._steps = [] if clear or waits else self._parts[1:], []
        if self._parts:
            self.choice = self._parts[0].planes
            return
        self._steps_since_trial = 0
        self._take(self._best(), waits or self._times)

    def _turns(self, *turns: Planes) -> list[_Part]:
        return [_Part(planes, TRIAL_STEPS, SETTLING_STEPS) for planes in turns]

    def _review(self) -> None:
        best = self._best()
        if self._cost_s(best) < (1 - WORTH) * self._cost_s(self.choice):
            self._choose(best, "correlations between ranks have changed")

    def _choose(self, planes: Planes, why: str) -> None:
        if planes != self.choice:
            self._take(planes, why)

    def _take(self, planes: Planes, why: str) -> None:
        self.choice = planes
        self._news.append(
            f"{planes.scatter} planes for contributions and {planes.gather} for means, ε about "
            f"{self._error(planes):.1%} (budget {self._budget:.1%}): {why}"
        )

    @property
    def _times(self) -> str:
        """What a trial has found."""
        few_ms, more_ms = 1e3 * self._step_s[self._few], 1e3 * self._step_s[self._compared]
        return f"a step took {few_ms:.3g} ms with {self._few} planes, {more_ms:.3g} ms with {self._compared}"

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
        return self._bias * self._predicted(self._correlation, planes)

    def _predicted(self, correlation: float, planes: Planes) -> float:
        return predicted(self._ranks, correlation, *planes, coding_carried=self._coding_carried)

    def _cost_s(self, planes: Planes) -> float:
        """(time per step) × (1 + ε), where the time grows by the same amount with every plane. If the cost of
        a plane is not known, the number of planes."""
        if not self._timed:
            return float(sum(planes))
        few_s, more_s = self._step_s[self._few], self._step_s[self._compared]
        plane_s = max(0.0, more_s - few_s) / (sum(self._compared) - sum(self._few))
        return (few_s + plane_s * (sum(planes) - sum(self._few))) * (1 + self._error(planes))
