"""t_B: how long an op may last, learned from ops that nothing has disturbed.

Owns the usual times of ops of one size, and the bounds that follow from them. All times run from the entry of
the majority. It knows nothing of links and reports.
"""

from __future__ import annotations

from typing import NamedTuple

from tailcut import _native
from tailcut.stats import OpBounds

SCATTER_SHARE = 0.5
"""The largest t_B of SCATTER, as a share of the deadline: SCATTER and GATHER move the same bytes."""

SCATTER_CAP_SHARE = 0.75
"""The cap from the first entry, as a share of the deadline: the rank that entered first still has a quarter
left for its GATHER."""

MARGIN = 1 / 8
"""An op may take this share longer than usual. Anything from 1.05 to 1.5 times the usual time did alike."""

LONG_MARGIN = 1.0
"""The same while what is late has cost too much of the budget."""

WINDOW = 20
"""Ops that say what is usual: bounds follow the network within as many."""

WARM_UP = 5
"""Ops before a bound is trusted: the second lowest of 5 is not that of a lucky one."""

USUAL_PERCENT = 25
"""The usual time is this percentile. Up to three quarters of the ops may be disturbed, such as by bursts into
this rank's own port; those into the other ports disturb no more than half of the ranks."""

SURE_PERCENT = 75
"""The same where what is cut is lost: trouble in more than a quarter of the ops is waited for."""

SKEW_PERCENT = 90
"""Ranks enter apart. The last one is waited for as much longer as it takes in so many of the ops."""

FAST_PERCENT = 10
SPREADS = 3
"""A host's own jitter makes the margin longer, by this many times what lies between a fast and a usual op. Of
times that vary by 10 % (lognormal), two in a hundred are beyond that, by little. Slow ops say nothing of
jitter: the network may have made them slow."""

LEAST_MARGIN_S = 0.010
LEAST_LONG_MARGIN_S = 0.050
LEAST_SURE_MARGIN_S = 0.075
LEAST_SHARED_MARGIN_S = 0.200
"""Hosts at times do not get to run for this long, and the pace of short ops varies by as much. Ranks that
share a host, and more of them than it has cores, wait for each other far longer."""

CUT_FACTOR = 2.0
"""An op that was cut counts as this many times the time at which it was cut, until late packets tell its real
time. From times that t_B itself cut, t_B could only ever fall."""

LATE_OPS = 5
LONGER = 2.0
"""Bounds become LONGER when most ranks were late in this many ops in a row. A port that is blocked makes only
its own rank late, for however long; when most are late, the network has changed. Three such steps make up for
a network that is five times slower, within 20 ops."""


class Wait(NamedTuple):
    """How much longer than usual an op is waited for."""

    percent: int
    margin: float
    least_s: float


HURRIED = Wait(USUAL_PERCENT, MARGIN, LEAST_MARGIN_S)
CALM = Wait(USUAL_PERCENT, LONG_MARGIN, LEAST_LONG_MARGIN_S)
"""What is late has cost too much of the budget."""
DEAF = Wait(USUAL_PERCENT, 0.0, 0.0)
"""The own port is closed: nothing will come in time, and the others wait until they hear from this rank."""
SURE = Wait(SURE_PERCENT, MARGIN, LEAST_SURE_MARGIN_S)
"""Nothing is carried."""
SHARED = Wait(SURE_PERCENT, LONG_MARGIN, LEAST_SHARED_MARGIN_S)
"""All ranks are on one host: they wait for its processors, and no network is to blame."""


class Usual:
    """How long something usually takes."""

    def __init__(self) -> None:
        self._times_s: dict[int, float] = {}  # by op, of the latest ones

    @property
    def known(self) -> bool:
        return len(self._times_s) >= WARM_UP

    def note(self, seq: int, took_s: float, *, cut: bool = False) -> None:
        """An op took so long, or was cut after that time."""
        self._times_s.pop(seq, None)  # of another lane, which numbers its ops alike
        self._times_s[seq] = CUT_FACTOR * took_s if cut else took_s
        if len(self._times_s) > WINDOW:
            del self._times_s[next(iter(self._times_s))]

    def correct(self, seq: int, took_s: float) -> None:
        """It is known now how long an op that was cut really took. Ignored if that is too long ago."""
        if seq in self._times_s:
            self._times_s[seq] = took_s

    def lengthen(self) -> None:
        """Forget all but that it takes LONGER from now on."""
        longer_s = LONGER * self.at(USUAL_PERCENT)
        self._times_s = {-op: longer_s for op in range(1, WARM_UP + 1)}

    def at(self, percent: int) -> float:
        """This percentile, rounded down; 0 if nothing is known."""
        ordered = sorted(self._times_s.values())
        return ordered[percent * (len(ordered) - 1) // 100] if ordered else 0.0

    def bound_s(self, wait: Wait, skew_s: float) -> float:
        usual_s = self.at(wait.percent)
        jitter_s = SPREADS * (self.at(USUAL_PERCENT) - self.at(FAST_PERCENT))
        return usual_s + max(wait.least_s, wait.margin * usual_s + jitter_s + skew_s)


class OpBound:
    """t_B of ops of one size, and of their SCATTER."""

    def __init__(self, longest: OpBounds) -> None:
        self.scatter, self.whole = Usual(), Usual()
        self._lag = Usual()  # from the majority's entry to the last one
        self._longest = longest
        self._late_in_a_row = 0

    @property
    def known(self) -> bool:
        """Whether the warm-up is over. Until then bounds are the longest."""
        return self.scatter.known and self.whole.known

    def entered(self, seq: int, lag_s: float) -> None:
        """In this op the last rank that was awaited entered so long after the majority."""
        self._lag.note(seq, max(0.0, lag_s))

    def ended(self, *, most_late: bool) -> None:
        """An op has ended. ``most_late``: without something of most of the ranks."""
        self._late_in_a_row = self._late_in_a_row + 1 if most_late else 0
        if self._late_in_a_row >= LATE_OPS and self.known:
            self._late_in_a_row = 0
            self.scatter.lengthen()
            self.whole.lengthen()

    def bounds(self, wait: Wait, most_skew_s: float) -> tuple[float, float]:
        """t_B of SCATTER and of GATHER, which runs from the end of SCATTER's. Ranks that enter apart have
        up to ``most_skew_s`` more than usual."""
        longest_s = self._longest.scatter_s, self._longest.gather_s
        if not self.known:
            return longest_s
        skew_s = min(most_skew_s, self._lag.at(SKEW_PERCENT) - self._lag.at(USUAL_PERCENT))
        scatter_s, whole_s = self.scatter.bound_s(wait, skew_s), self.whole.bound_s(wait, skew_s)
        # If t_B closes SCATTER, all bytes of the mean may have to move afterwards: as many as before.
        gather_s = max(whole_s - scatter_s, self.scatter.at(wait.percent), LEAST_MARGIN_S)
        return min(longest_s[0], scatter_s), min(longest_s[1], gather_s)


def fixed(deadline_s: float) -> OpBounds:
    """The bounds while nothing is known: the deadline divided between the stages, without early exit."""
    return OpBounds(
        scatter_s=SCATTER_SHARE * deadline_s,
        scatter_cap_s=SCATTER_CAP_SHARE * deadline_s,
        gather_s=deadline_s,
        scatter_grace_s=deadline_s,
        gather_grace_s=deadline_s,
        deadline_s=deadline_s,
    )


def to_native(bounds: OpBounds) -> _native.Bounds:
    return _native.Bounds(
        scatter_ns=round(1e9 * bounds.scatter_s),
        scatter_cap_ns=round(1e9 * bounds.scatter_cap_s),
        gather_ns=round(1e9 * bounds.gather_s),
        scatter_grace_ns=round(1e9 * bounds.scatter_grace_s),
        gather_grace_ns=round(1e9 * bounds.gather_grace_s),
        deadline_ns=round(1e9 * bounds.deadline_s),
        absent_ns=round(1e9 * bounds.absent_s),
    )


def fixed_bounds(deadline_s: float) -> _native.Bounds:
    return to_native(fixed(deadline_s))
