"""t_B: how long a stage may last, learned from how long stages take.

Owns the bounds of a stage before and after something is known of it. SCATTER starts with the entry of the
majority; GATHER starts with the close of the own shard or with the own entry.
"""

from __future__ import annotations

from collections import deque

from tailcut import _native
from tailcut.stats import OpBounds

SCATTER_SHARE = 0.5
"""The largest t_B of SCATTER, as a share of the deadline: SCATTER and GATHER move the same bytes."""

SCATTER_CAP_SHARE = 0.75
"""The cap from the first entry, as a share of the deadline: the rank that entered first still has a quarter
left for its GATHER."""

LEAST_SHARE = 1 / 200
"""The smallest t_B, as a share of the deadline (50 ms of 10 s). A user who allows an op seconds does not want
parts of gradients dropped to save milliseconds. On a quiet 2-core host an op of 0.1 ms at times takes 2 ms,
or 4."""

WINDOW = 23
"""Samples that t_B is derived from. They are few enough for t_B to fall within 20 ops: after these, at most
three older samples are left."""

WARM_UP = 5
"""Samples needed before t_B is trusted: the second highest of 5 is not that of a slow first op."""

PERCENTILE = 90
"""Percentile of the samples in the window, rounded down. This is the fourth highest, so that three bursts
within a window do not lengthen the wait for the next. OptiReduce uses 95. With 95 and 16 samples, P99 over
P50 under rare bursts of twice an op's bytes was 1.12 to 1.84 in eight seeds; with these values it is 1.01 to
1.15."""

MARGIN = 0.10
"""Added to the percentile, as a share of it. Where stages hardly vary, one that was hit ends only 10 % later
than the others. Of stages whose times vary by 10 % (lognormal) this cuts 3 %; of those that vary by 30 %, 11
%."""

LEAST_MARGIN_S = 0.010
"""Hosts at times do not get to run for this long, and the pace of short ops varies by as much."""

CUT_FACTOR = 2.0
"""A stage that was cut counts as this many times the time at which it was cut, unless late packets tell its
real time. From times that t_B itself cut, t_B could only ever fall."""

TAIL_OPS = 4
"""Up to this many stages in a row that were cut are one event, and one sample: a burst of other traffic is
the tail that t_B is there to cut. If there are more, the network has become slower, and each of them
counts."""


class StageBound:
    """t_B of one stage in one size class."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self.bound_s = most_s
        self._least_s = least_s
        self._most_s = most_s
        self._high_s = 0.0  # the percentile of the samples
        # A sample: by op, how long its stage took, or the guess for one that was cut.
        self._samples: deque[dict[int, float]] = deque(maxlen=WINDOW)
        self._cuts_in_a_row = 0

    @property
    def known(self) -> bool:
        """Whether the warm-up is over. Until then the bound is the longest."""
        return len(self._samples) >= WARM_UP

    def completed(self, seq: int, took_s: float) -> None:
        """A stage ended in which everything came that was waited for."""
        self._cuts_in_a_row = 0
        self._samples.append({seq: took_s})
        self._derive()

    def cut(self, seq: int, after_s: float) -> None:
        """A stage ended before everything had come."""
        took_s = CUT_FACTOR * after_s
        if took_s < self._high_s:  # the deadline or the cap cut it, which says nothing of what is usual
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
        """It is known now what a stage that was cut has really taken. Ignored if that is too long ago.

        What comes after the end waits for ops that are alive, so a time far above the guess is not the
        stage's.
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
