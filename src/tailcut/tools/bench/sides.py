"""The things that are compared, behind one interface: average this array, say what of it arrived."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tailcut.config import Config
from tailcut.epsilon import unbiased_nmse
from tailcut.group import Group
from tailcut.report import Report
from tailcut.store import FileStore


class Side(Protocol):
    """One rank's end of an allreduce."""

    def allreduce(self, array: npt.NDArray[np.float32]) -> Report | None:
        """Average over the ranks, in place. This call is what is timed. None: everything arrived."""

    def nmse_tolerance(self) -> float:
        """How far a correct result may be from the rank-order mean of independent uniform vectors."""

    def close(self) -> None: ...


OpenSide = Callable[[int, int, Path, Config], Side]
"""``open(rank, ranks, directory, config)``; must be importable, as it is called in the workers."""


class TailcutSide:
    def __init__(self, rank: int, ranks: int, directory: Path, config: Config) -> None:
        self._group = Group(rank, ranks, FileStore(directory / "tailcut"), config)
        self._fewest_planes = config.planes or 16

    def allreduce(self, array: npt.NDArray[np.float32]) -> Report:
        report = self._group.allreduce(array).wait()
        if report.scatter.planes:
            self._fewest_planes = min(self._fewest_planes, report.scatter.planes, report.gather.planes)
        return report

    def nmse_tolerance(self) -> float:
        if self._group.codec == "raw":
            return 0.0
        # One quantization on the way to the owner and one on the way back; half as much again for short
        # buckets, and 1e-7 for a coordinate far out, where cells are wide: one in millions.
        once = unbiased_nmse(self._fewest_planes)
        return 1.5 * (2 * once + once**2) + 1e-7

    def close(self) -> None:
        self._group.close()


class GlooSide:
    def __init__(self, rank: int, ranks: int, directory: Path, config: Config) -> None:
        from tailcut.pytorch.gloo import GlooGroup  # torch is optional, and slow to import

        self._group = GlooGroup(rank, ranks, directory / "gloo")
        self._ranks = ranks

    def allreduce(self, array: npt.NDArray[np.float32]) -> None:
        self._group.allreduce(array)

    def nmse_tolerance(self) -> float:
        # It adds in another order: each sum rounds by at most half a unit in its last place, of at most 0.5 a
        # rank, while a mean coordinate's variance is 1/12 by the number of ranks.
        return 3 * self._ranks**3 * 2.0**-46

    def close(self) -> None:
        self._group.close()


class CompressedSide:
    """Gloo under one of torch's hooks that compress."""

    def __init__(self, hook: str, nmse: float, rank: int, ranks: int, directory: Path) -> None:
        from tailcut.pytorch.gloo import CompressedGlooGroup

        self._group = CompressedGlooGroup(rank, ranks, directory / hook, hook)
        self._nmse = nmse

    def allreduce(self, array: npt.NDArray[np.float32]) -> None:
        self._group.allreduce(array)

    def nmse_tolerance(self) -> float:
        return self._nmse

    def close(self) -> None:
        self._group.close()


# The arrays' values are uniform: rounding errs by at most half a unit in the last place, once on the way in
# and at every addition.
def fp16_side(rank: int, ranks: int, directory: Path, config: Config) -> Side:
    return CompressedSide("fp16", ranks**3 * 2.0**-22, rank, ranks, directory)


def bf16_side(rank: int, ranks: int, directory: Path, config: Config) -> Side:
    return CompressedSide("bf16", ranks**3 * 2.0**-16, rank, ranks, directory)


def powersgd_side(rank: int, ranks: int, directory: Path, config: Config) -> Side:
    # It promises nothing of one step: what it leaves out comes in later ones.
    return CompressedSide("powersgd", math.inf, rank, ranks, directory)


SIDES: dict[str, OpenSide] = {
    "tailcut": TailcutSide,
    "gloo": GlooSide,
    "fp16": fp16_side,
    "bf16": bf16_side,
    "powersgd": powersgd_side,
}


def delivered_frac(report: Report | None, rank: int) -> float:
    """The share of what the peers owed this rank, contributions to its shard and means, that arrived."""
    if report is None:
        return 1.0
    if report.status == "behind":
        return 0.0
    others = [link for peer, link in zip(report.members, report.links, strict=True) if peer != rank]
    lost = [link.scatter.lost_frac + link.gather.lost_frac + link.gather.empty_frac for link in others]
    return 1.0 - sum(lost) / (2 * len(others)) if others else 1.0
