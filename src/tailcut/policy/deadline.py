"""t_B: how long a stage may last, learned from how long stages take.

Owns the bounds of a stage before and after something is known of it. A stage starts with the entry of the
majority (SCATTER), with the close of the own shard or the own entry (GATHER).
"""

from __future__ import annotations

from collections import deque

from tailcut import _native
from tailcut.stats import OpBounds

SCATTER_SHARE = 0.5
"""t_B of SCATTER as a share of the deadline, at most: SCATTER and GATHER move the same bytes."""

SCATTER_CAP_SHARE = 0.75
"""The cap from the first arrival: the rank that entered first still has a quarter left for its GATHER."""

LEAST_SHARE = 1 / 200
"""t_B as a share of the deadline, at least (50 ms of 10 s): who allows an op seconds does not want parts of
gradients dropped to save milliseconds. On a quiet 2-core host an op of 0.1 ms takes 2 ms at times, or 4."""

WINDOW = 23
"""Samples that t_B comes from. Few enough for it to fall within 20 ops: no more than three are older then."""

WARM_UP = 5
"""Samples before t_B is trusted: the second highest of 5 is not that of a slow first op."""

PERCENTILE = 90
"""Of the samples in the window, rounded down: the fourth highest, so that three bursts in the time of a
window do not lengthen the wait for the next. OptiReduce has 95. With that and 16 samples, P99 over P50 of
tail-3 was 1.12 to 1.84 in eight seeds, 1.17 in the middle; with these the middle one is 1.12."""

MARGIN = 0.10
"""Over the percentile. Where stages hardly vary, one that was hit ends 10 % later than the others and not
more; of those whose times vary by 10 % (lognormal) this cuts 3 %, by 30 % 11 %."""

LEAST_MARGIN_S = 0.010
"""Hosts do not get to run for that long at times, and the pace of short ops varies by as much."""

CUT_FACTOR = 2.0
"""A stage that was cut has taken so many times the time at which it was, unless late packets tell: from times
that it cut itself, t_B could only ever fall."""

TAIL_OPS = 4
"""So many stages in a row that were cut, at most, are one event, and one sample: a burst of other traffic is
the tail that t_B is there to cut. More, and the network has become slower: then each of them counts."""


class StageBound:
    """t_B of one stage in one size class."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self.bound_s = most_s
        self._least_s = least_s
        self._most_s = most_s
        self._high_s = 0.0  # the percentile of the samples
        # What a sample stands for: by op, how long its stage took, or the guess for one that was cut.
        self._samples: deque[dict[int, float]] = deque(maxlen=WINDOW)
        self._cuts_in_a_row = 0

    @property
    def known(self) -> bool:
        """Whether the warm-up is over; until then the bound is the longest."""
        return len(self._samples) >= WARM_UP

    def completed(self, seq: int, took_s: float) -> None:
        """A stage in which everything came that was waited for."""
        self._cuts_in_a_row = 0
        self._samples.append({seq: took_s})
        self._derive()

    def cut(self, seq: int, after_s: float) -> None:
        """A stage that ended before everything had come."""
        took_s = CUT_FACTOR * after_s
        if took_s < self._high_s:  # by the deadline or the cap: that says nothing of what is usual
            return
        self._cuts_in_a_row += 1
        if self._cuts_in_a_row == TAIL_OPS + 1:
            self._samples.extend({op: s} for op, s in self._samples.pop().items())
        if 1 < self._cuts_in_a_row <= TAIL_OPS:
            self._samples[-1][seq] = took_s
        else:
            self._samples.append({seq: took_s})
        self._derive()

    def came_late(self, seq: int, took_s: float) -> None:
        """What a stage that was cut has really taken; nothing if that is too long ago.

        What comes after the end waits for ops that are alive: a time far above the guess is not the stage's.
        """
        for sample in self._samples:
            if seq in sample:
                sample[seq] = min(took_s, CUT_FACTOR * sample[seq])
                self._derive()

    def _derive(self) -> None:
        ordered = sorted(max(sample.values()) for sample in self._samples)
        self._high_s = ordered[PERCENTILE * (len(ordered) - 1) // 100]
        if self.known:
            margin_s = max(MARGIN * self._high_s, self._least_s, LEAST_MARGIN_S)
            self.bound_s = min(self._most_s, max(self._least_s, self._high_s + margin_s))


def fixed(deadline_s: float) -> OpBounds:
    """What holds while nothing is known: the deadline divided between the stages, and no early exit."""
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
    )


def fixed_bounds(deadline_s: float) -> _native.Bounds:
    return to_native(fixed(deadline_s))
