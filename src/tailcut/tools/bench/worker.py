"""One rank of the benchmark: fill, meet the others, time one op, check it, and again.

Owns the order of things in a worker; judges nothing.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tailcut.config import Config
from tailcut.tools.bench.barrier import Barrier
from tailcut.tools.bench.sides import OpenSide, Side, delivered_frac
from tailcut.tools.workers import Send

WARMUP = -1
"""The round before the first: checked like the others, but not counted."""

_PLACES = 1024
"""Different inputs before they repeat."""

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Plan:
    """What every worker does: the same on all ranks."""

    ranks: int
    counts: tuple[int, ...]
    """Coordinates of each bucket."""
    iters: tuple[int, ...]
    """Timed ops of each bucket, per round and side."""
    warmup: int
    rounds: int
    sides: dict[str, OpenSide]
    config: Config
    directory: Path
    namespaces: tuple[Path, ...] = ()
    """On a testbed: each rank's network namespace."""

    def schedule(self) -> Iterator[tuple[int, int, str]]:
        """``(count_index, round, side)`` in order; every second round the sides change places."""
        names = list(self.sides)
        for index in range(len(self.counts)):
            for round_index in (WARMUP, *range(self.rounds)):
                for name in names if round_index % 2 == 0 else reversed(names):
                    yield index, round_index, name

    @property
    def steps_per_count(self) -> int:
        return (1 + self.rounds) * len(self.sides)


@dataclass(frozen=True)
class Sample:
    """One op on one rank."""

    elapsed_s: float
    delivered: float
    nmse: float
    correct: bool
    """Within the side's tolerance of the rank-order mean. False is an error if everything came, and whole."""
    trimmed: int = 0
    """Packets that came shorter than they were sent."""


@dataclass(frozen=True)
class Samples:
    """One side's ops in one round, on one rank."""

    count_index: int
    round_index: int
    side: str
    ops: tuple[Sample, ...]


class Source:
    """A rank's input and the right answer, for op after op.

    Op k reads its bucket from one longer random vector, from coordinate k on; the mean is taken coordinate by
    coordinate, so its answer is in the longer mean at the same place. The last op's result is no answer.
    """

    def __init__(self, rank: int, ranks: int, count: int) -> None:
        length = count + _PLACES
        mean = np.zeros(length, np.float32)
        for peer in range(ranks):
            vector = np.random.default_rng((count, peer)).random(length, np.float32) - np.float32(0.5)
            mean += vector
            if peer == rank:
                self._own = vector
        mean /= np.float32(ranks)
        self._mean = mean
        self._op = 0
        self._count = count

    def fill(self, bucket: Vector) -> Vector:
        """Write the next op's input; return its answer."""
        first = self._op % _PLACES
        here = slice(first, first + self._count)
        self._op += 1
        bucket[:] = self._own[here]
        return self._mean[here]


def measure(rank: int, send: Send, plan: Plan) -> None:
    """The worker's entry: sends one Samples for each step of the plan's schedule."""
    if plan.namespaces:
        _enter_network(plan.namespaces[rank])
    gate = Barrier(plan.directory / "gate", rank, plan.ranks + 1)
    barrier = Barrier(plan.directory / "barrier", rank, plan.ranks)
    sides = {
        name: open_side(rank, plan.ranks, plan.directory, plan.config)
        for name, open_side in plan.sides.items()
    }
    current = -1
    for index, round_index, name in plan.schedule():
        if index != current:
            current = index
            source = Source(rank, plan.ranks, plan.counts[index])
            bucket = np.empty(plan.counts[index], np.float32)
        ops = plan.warmup if round_index == WARMUP else plan.iters[index]
        samples = [_one_op(sides[name], rank, bucket, source, barrier) for _ in range(ops)]
        send(Samples(index, round_index, name, tuple(samples)))
        gate.wait()  # for the parent, who may read counters between the steps
    for side in sides.values():
        side.close()


def _enter_network(namespace: Path) -> None:
    """Of this thread and those that it will start."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(namespace))
    finally:
        os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _one_op(side: Side, rank: int, bucket: Vector, source: Source, barrier: Barrier) -> Sample:
    answer = source.fill(bucket)
    barrier.wait()
    start = time.perf_counter()
    report = side.allreduce(bucket)
    elapsed_s = time.perf_counter() - start
    barrier.wait()  # so that checking takes no processor from a rank whose op is still timed
    trimmed = report.traffic.trimmed_packets if report else 0
    if np.array_equal(bucket, answer):
        return Sample(elapsed_s, delivered_frac(report, rank), nmse=0.0, correct=True, trimmed=trimmed)
    # Not np.dot: the threads of its library go on spinning into the next op.
    nmse = float(np.square(bucket - answer).sum() / np.square(answer).sum())
    correct = nmse <= side.nmse_tolerance()  # also False for a NaN
    return Sample(elapsed_s, delivered_frac(report, rank), nmse, correct, trimmed)
