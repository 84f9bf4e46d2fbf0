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


class Turns:
    """Blocks in turns. To copy one costs ``costs_bytes``, and a step may spend ``step_bytes``."""

    def __init__(self, costs_bytes: Sequence[int], step_bytes: int) -> None:
        self._starts = list(accumulate(costs_bytes, initial=0))[:-1]  # of the blocks, in spent bytes
        self._round_bytes = sum(costs_bytes)
        self._step_bytes = min(step_bytes, self._round_bytes)

    def compared(self, step: int) -> list[int]:
        """Indices of the blocks whose turn it is to be compared."""
        place, blocks = step % COMPARED_STEPS, len(self._starts)
        return list(range(place * blocks // COMPARED_STEPS, (place + 1) * blocks // COMPARED_STEPS))

    def copied(self, step: int) -> list[int]:
        """Those whose turn it is to be copied if they differ: they begin within what the step may spend."""
        if self._round_bytes == 0:
            return []
        low = (step * self._step_bytes) % self._round_bytes
        high = low + self._step_bytes
        first, last = bisect_left(self._starts, low), bisect_left(self._starts, high)
        wrapped = bisect_left(self._starts, high - self._round_bytes)
        return [*range(first, last), *range(wrapped)]

    def all_soon(self, wish: int, step: int) -> list[int]:
        """The blocks of a step after a wish, which is the number of a step or 0."""
        if not 0 <= step - wish < URGENT_STEPS or wish == 0:
            return []
        return list(range(step - wish, len(self._starts), URGENT_STEPS))
