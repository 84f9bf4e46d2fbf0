"""Which blocks are compared in which step: a function of the step alone, so that ranks that have missed
something still agree."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

COMPARED_STEPS = 50
"""All blocks are compared once in so many steps."""

URGENT_STEPS = 8
"""All blocks are copied, where they differ, within so many steps when somebody wishes it."""

LOT = 8
"""Blocks have their turn by so many at a time. A turn wakes a thread and asks every owner, so that a small
model takes it in few of the steps."""


class Turns:
    """Blocks in turns. To copy one costs ``costs_bytes``, and a step may spend ``step_bytes``."""

    def __init__(self, costs_bytes: Sequence[int], step_bytes: int) -> None:
        self._blocks = len(costs_bytes)
        self._starts = list(accumulate(costs_bytes, initial=0))[:-1:LOT]  # of the lots, in spent bytes
        self._round_bytes = sum(costs_bytes)
        self._step_bytes = min(step_bytes, self._round_bytes)

    def compared(self, step: int) -> range:
        """Indices of the blocks whose turn it is to be compared."""
        place, lots = step % COMPARED_STEPS, len(self._starts)
        return self._in(range(place * lots // COMPARED_STEPS, (place + 1) * lots // COMPARED_STEPS))

    def copied(self, step: int) -> list[int]:
        """Those whose turn it is to be copied if they differ: lots that begin in what the step may spend."""
        if self._round_bytes == 0:
            return []
        low = (step * self._step_bytes) % self._round_bytes
        high = low + self._step_bytes
        first, last = bisect_left(self._starts, low), bisect_left(self._starts, high)
        wrapped = bisect_left(self._starts, high - self._round_bytes)
        return [*self._in(range(first, last)), *self._in(range(wrapped))]

    def all_soon(self, wish: int, step: int) -> list[int]:
        """The blocks of a step after a wish, which is the number of a step or 0."""
        if not 0 <= step - wish < URGENT_STEPS or wish == 0:
            return []
        return list(range(step - wish, self._blocks, URGENT_STEPS))

    def _in(self, lots: range) -> range:
        """The blocks in a run of lots."""
        return range(LOT * lots.start, min(LOT * lots.stop, self._blocks))
