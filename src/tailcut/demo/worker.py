"""One rank of the demo, and what it shows to the parent through shared memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.group import Group
from tailcut.report import Report
from tailcut.store import FileStore
from tailcut.workers import Send

_ENTRY = np.dtype([("ops", np.int64), ("last_s", np.float64), ("lost", np.float64)])
Entries = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens, and when. At one op per deadline, the freeze stays well inside Config.window_ops."""

    ranks: int = 4
    frozen_rank: int = 2
    count: int = 1 << 20
    """Coordinates: 4 MB."""
    compute_s: float = 0.008
    deadline_s: float = 0.15
    before_s: float = 3.0
    freeze_s: float = 2.0
    after_s: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.frozen_rank < self.ranks:
            raise ConfigError(
                f"frozen_rank={self.frozen_rank} must be between 0 and ranks - 1 = {self.ranks - 1}"
            )


@dataclass(frozen=True)
class Op:
    """One op on one rank; the clock is the machine's monotonic one."""

    entered_s: float
    ended_s: float
    report: Report


class Board:
    """Memory that all processes map: a row per rank, written by it alone; the end, by the parent."""

    def __init__(self, directory: Path, ranks: int, *, create: bool = False) -> None:
        mode: Literal["w+", "r+"] = "w+" if create else "r+"
        self.entries: Entries = np.memmap(directory / "board", dtype=_ENTRY, mode=mode, shape=(ranks,))
        self._stop = np.memmap(directory / "stop", dtype=np.int64, mode=mode, shape=(1,))
        if create:
            self.stop_after(np.iinfo(np.int64).max)

    def stop_after(self, ops: int) -> None:
        """All ranks end together when they have done this many."""
        self._stop[0] = ops

    def finished(self, ops: int) -> bool:
        return bool(ops >= self._stop[0])


def work(rank: int, send: Send, script: Script, directory: Path) -> None:
    """The worker's entry: sends its ops when all have ended."""
    send(_average(rank, script, directory))


def _average(rank: int, script: Script, directory: Path) -> list[Op]:
    board = Board(directory, script.ranks)
    gradient = np.random.default_rng(rank).standard_normal(script.count, np.float32)
    bucket = np.empty_like(gradient)
    ops: list[Op] = []
    lost = 0.0
    with Group(
        rank, script.ranks, FileStore(directory / "store"), Config(deadline_s=script.deadline_s)
    ) as group:
        while not ops or not board.finished(ops[-1].report.seq + 1):
            bucket[:] = gradient
            time.sleep(script.compute_s)  # stands for the backward pass
            entered_s = time.monotonic()
            report = group.allreduce(bucket).wait()
            ops.append(Op(entered_s, time.monotonic(), report))
            if report.status == "behind":
                group.resynced()  # the demo has no state that a peer would have to send
            lost += report.lost_frac
            board.entries[rank] = (report.seq + 1, report.elapsed_s, lost / len(ops))
    return ops
