"""One rank of the demo. It trains on its part of the digits and shows its progress in shared memory."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.report import Report
from tailcut.tools.demo.freeze.digits import CLASSES, PIXELS, Digits, batches, steps_per_epoch
from tailcut.tools.workers import Send

Side = Literal["tailcut", "gloo"]

WINDOW_OPS = 4096
FASTEST_STEP_S = 0.01
OPS_PER_STEP = 2
"""The first bucket of DDP holds 1 MiB, the second the rest of the model."""

_ENTRY = np.dtype([("steps", np.int64), ("loss", np.float64), ("last_s", np.float64)])
Entries = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens and when. It is the same on both sides."""

    ranks: int = 4
    frozen_rank: int = 2
    epochs: int = 16
    batch: int = 16
    """The number of images per rank and step."""
    width: int = 700
    """The width of the three hidden layers. The model has about a million parameters."""
    learning_rate: float = 0.05
    deadline_s: float = 0.15
    freeze_at_step: int = 120
    freeze_s: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.frozen_rank < self.ranks:
            raise ConfigError(
                f"frozen_rank={self.frozen_rank} must be between 1 and ranks - 1 = {self.ranks - 1}: "
                "rank 0 is the one that the others are compared with"
            )
        if not 1 <= self.freeze_at_step < self.steps:
            raise ConfigError(
                f"freeze_at_step={self.freeze_at_step} must be between 1 and the last step, {self.steps - 1}"
            )
        if OPS_PER_STEP * self.freeze_s / FASTEST_STEP_S > WINDOW_OPS:
            raise ConfigError(
                f"freeze_s={self.freeze_s} is more than what a window of {WINDOW_OPS} ops covers: the others "
                "do not wait for a rank that is silent; freeze for a shorter time"
            )

    @property
    def steps(self) -> int:
        return self.epochs * steps_per_epoch(self.ranks, self.batch)

    @property
    def layers(self) -> tuple[int, ...]:
        return (PIXELS, self.width, self.width, self.width, CLASSES)

    @property
    def parameters(self) -> int:
        return sum((a + 1) * b for a, b in zip(self.layers, self.layers[1:], strict=False))


@dataclass(frozen=True)
class Step:
    """One step on one rank. Its times are those of the machine's monotonic clock."""

    index: int
    """Which step of the group it is. A rank that was behind leaves some out."""
    started_s: float
    ended_s: float
    loss: float
    reports: tuple[Report, ...]
    """The reports of its ops. With Gloo there are none."""


@dataclass(frozen=True)
class Replica:
    """What one rank ended with. ``drift`` is the relative distance from the parameters of rank 0."""

    steps: list[Step]
    accuracy: float
    drift: float
    drift_after_resync: float


class Board:
    """Memory that all processes map. It has a row for each rank, which only that rank writes."""

    def __init__(self, directory: Path, ranks: int, *, create: bool = False) -> None:
        mode: Literal["w+", "r+"] = "w+" if create else "r+"
        self.entries: Entries = np.memmap(directory / "board", dtype=_ENTRY, mode=mode, shape=(ranks,))


def work(rank: int, send: Send, side: Side, script: Script, directory: Path) -> None:
    """What a worker runs. It sends its Replica when all have ended."""
    from tailcut.pytorch.training import SIDES, Setup  # torch is optional, and its import takes long

    board = Board(directory, script.ranks)
    digits = Digits.read(directory / "digits.npz")
    # What tailcut says at both ends, and its warnings, would tear the display. The summary says the same.
    warnings.filterwarnings("ignore", "tailcut: ", RuntimeWarning)
    with contextlib.redirect_stderr(io.StringIO()):
        trainer = SIDES[side](
            Setup(
                rank=rank,
                ranks=script.ranks,
                rendezvous=directory / "rendezvous",
                layers=script.layers,
                learning_rate=script.learning_rate,
                seed=script.seed,
                config=Config(deadline_s=script.deadline_s, window_ops=WINDOW_OPS),
            )
        )
    steps: list[Step] = []
    own = batches(rank, script.ranks, script.batch, script.epochs, script.seed)
    for chosen in trainer.batches(own):
        images, labels = digits.train_images[chosen], digits.train_labels[chosen]
        started_s = time.monotonic()
        loss = trainer.step(images, labels)
        ended_s = time.monotonic()
        steps.append(Step(trainer.steps - 1, started_s, ended_s, loss, trainer.take_reports()))
        board.entries[rank] = (trainer.steps, loss, ended_s - started_s)
    accuracy = trainer.accuracy(digits.test_images, digits.test_labels)
    drift = trainer.drift()
    trainer.resync()
    send(Replica(steps, accuracy, drift, trainer.drift()))
    with contextlib.redirect_stderr(io.StringIO()):
        trainer.close()
