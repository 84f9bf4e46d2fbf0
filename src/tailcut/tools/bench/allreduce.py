"""``tailcut bench allreduce``: the time of an op by bucket size, alone or against Gloo and torch's hooks.

It runs on local workers or on the hosts of a testbed. Owns the options, the workers and the result of a run.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.tools.bench.barrier import Barrier
from tailcut.tools.bench.figures import Figures, Round, judge
from tailcut.tools.bench.placement import OnLoopback, Placement
from tailcut.tools.bench.sides import SIDES
from tailcut.tools.bench.worker import WARMUP, Plan, Samples, measure
from tailcut.tools.workers import Workers

DEFAULT_SIZES = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)
"""From 1 KB to 100 MB, each about 4 times the one before. 25 MB is the size of DDP's buckets."""

ROUND_BYTES = 256 << 20
"""What one side moves in a round if ``iters`` is not given: 5 ops of 100 MB, or 100 ops of up to 2 MB."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. It is checked here, so that a mistake costs no workers."""

    ranks: tuple[int, ...] = (4,)
    sizes_bytes: tuple[int, ...] = DEFAULT_SIZES
    iters: int | None = None
    """How many ops of a round and side are timed. None takes fewer for larger buckets."""
    warmup: int = 3
    rounds: int = 7
    sides: tuple[str, ...] = ("tailcut",)
    config: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        for ranks in self.ranks:
            if not 1 <= ranks <= 256:
                raise ConfigError(f"ranks={ranks} must be between 1 and 256 local workers")
        for size_bytes in self.sizes_bytes:
            if size_bytes < 4 or size_bytes % 4:
                raise ConfigError(f"size {size_bytes} must be a positive multiple of 4: buckets are float32")
        if self.iters is not None and self.iters < 1:
            raise ConfigError(f"iters={self.iters} must be at least 1")
        if self.warmup < 0:
            raise ConfigError(f"warmup={self.warmup} must not be negative")
        if self.rounds < 1 or (len(self.sides) > 1 and self.rounds < 5):
            raise ConfigError(f"rounds={self.rounds} is too few: 1 is the least, and 5 for a comparison")

    def iters_for(self, size_bytes: int) -> int:
        return self.iters or min(100, max(5, ROUND_BYTES // size_bytes))


@dataclass(frozen=True)
class Row:
    """The result for one bucket size and one number of ranks."""

    ranks: int
    size_bytes: int
    sides: dict[str, Figures]


class Progress(Protocol):
    """It is told after every step how far the run is."""

    def step(self, text: str, done: int, total: int) -> None: ...


class NoProgress:
    def step(self, text: str, done: int, total: int) -> None:
        pass


_LOOPBACK = OnLoopback()


def run(
    options: Options, progress: Progress | None = None, placement: Placement = _LOOPBACK
) -> Generator[Row]:
    """Measure, and yield each row when it is complete. Raises WrongResultError, or PeerError for a worker."""
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="tailcut-bench-") as directory:
            plan = Plan(
                ranks=ranks,
                counts=tuple(size_bytes // 4 for size_bytes in options.sizes_bytes),
                iters=tuple(options.iters_for(size_bytes) for size_bytes in options.sizes_bytes),
                warmup=options.warmup,
                rounds=options.rounds,
                sides={name: SIDES[name] for name in options.sides},
                config=options.config,
                directory=Path(directory),
                namespaces=placement.namespaces,
            )
            yield from run_plan(plan, progress or NoProgress(), placement)


def run_plan(plan: Plan, progress: Progress, placement: Placement = _LOOPBACK) -> Iterator[Row]:
    """Measure one number of ranks. The workers live as long as this iterator."""
    Barrier.create(plan.directory / "barrier", plan.ranks)
    Barrier.create(plan.directory / "gate", plan.ranks + 1)
    gate = Barrier(plan.directory / "gate", plan.ranks, plan.ranks + 1)
    counted = placement.wire_bytes()
    total = plan.steps_per_count * len(plan.counts)
    rounds: dict[str, list[Round]] = {name: [] for name in plan.sides}
    progress.step(f"{plan.ranks} ranks, starting", 0, total)
    with Workers(plan.ranks, measure, (plan,)) as workers:
        for done, by_rank in enumerate(_in_step(workers, plan.ranks), start=1):
            count = plan.counts[by_rank[0].count_index]
            before, counted = counted, placement.wire_bytes()
            gate.wait()
            sent = None if counted is None or before is None else counted - before
            judged = judge(by_rank, count, sent)
            if by_rank[0].round_index != WARMUP:
                rounds[by_rank[0].side].append(judged)
            progress.step(f"{plan.ranks} ranks, {4 * count} bytes", done, total)
            if done % plan.steps_per_count == 0:
                sides = {name: Figures(plan.ranks, count, tuple(rounds[name])) for name in plan.sides}
                rounds = {name: [] for name in plan.sides}
                yield Row(plan.ranks, 4 * count, sides)


def _in_step(workers: Workers, ranks: int) -> Iterator[list[Samples]]:
    """Every rank sends in the order of the plan, so one message from each makes one step."""
    heard: list[deque[Samples]] = [deque() for _ in range(ranks)]
    for heard_of in workers.messages():
        assert heard_of is not None
        rank, message = heard_of
        assert isinstance(message, Samples)
        heard[rank].append(message)
        if all(heard):
            yield [messages.popleft() for messages in heard]
