"""What the scripts of all frameworks share: a problem to train on, a rank that freezes, times of steps."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.frameworks.checks import FROZEN_RANK, FROZEN_S
from tests.training.common import INPUTS, OUTPUTS, RANK, RANKS

FREEZE_AT = 12
BATCH = 8


def examples(steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    count = steps * BATCH * RANKS
    return TensorDataset(
        torch.randn(count, INPUTS, generator=generator), torch.randn(count, OUTPUTS, generator=generator)
    )


def loader(steps: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """One epoch of so many steps, other batches on every rank."""
    data = examples(steps)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, RANKS, RANK, shuffle=False
    )
    return DataLoader(data, BATCH, sampler=sampler)


class Watch:
    """Times the steps of one rank, and freezes another in the middle of its training."""

    def __init__(self, freeze: bool) -> None:
        self._freezes = freeze and RANK == FROZEN_RANK
        self._steps = 0
        self._last_s = 0.0
        self.longest_s = 0.0
        """From one step to the next, from the step at which a rank freezes."""
        self.steps = 0
        """Steps that were measured."""

    def step(self) -> None:
        """A step has ended."""
        now_s = time.monotonic()
        if self._steps >= FREEZE_AT:
            self.longest_s = max(self.longest_s, now_s - self._last_s)
            self.steps += 1
        self._steps += 1
        self._last_s = now_s
        if self._freezes and self._steps == FREEZE_AT:
            freeze()

    def result(self) -> dict[str, float]:
        return {"longest_s": self.longest_s, "steps": self.steps}


def freeze() -> None:
    """Stop this process, with all its threads, for some seconds."""
    own = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {FROZEN_S}; kill -CONT {own}"])
    os.kill(own, signal.SIGSTOP)
