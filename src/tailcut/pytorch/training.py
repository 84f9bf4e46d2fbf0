"""The model of one rank under DDP, for the demo of a freeze. Gloo averages its gradients, or tailcut does.

Owns the default process group of this process. Knows nothing of freezes, clocks or displays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.pytorch.attach import attach
from tailcut.pytorch.gloo import join_gloo
from tailcut.report import Report

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a rank needs to know before the first step. Only ``rank`` differs between ranks."""

    rank: int
    ranks: int
    rendezvous: Path
    layers: Sequence[int]
    """The widths of the layers, from the pixels to the classes."""
    learning_rate: float
    seed: int
    config: Config
    """The configuration of tailcut. Plain DDP does not use it."""


class GlooTrainer:
    """A classifier trained by plain DDP."""

    def __init__(self, setup: Setup) -> None:
        join_gloo(setup.rank, setup.ranks, setup.rendezvous)
        torch.manual_seed(setup.seed)
        self._ddp = DistributedDataParallel(_mlp(setup.layers))
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), setup.learning_rate, momentum=0.9)
        self._steps = 0

    def step(self, images: Images, labels: Labels) -> float:
        """Do one step with this rank's batch and return its loss."""
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._ddp(torch.from_numpy(images)), torch.from_numpy(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._steps += 1
        return loss.item()

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Those that this rank computes."""
        return iter(batches)

    @property
    def steps(self) -> int:
        """How many steps the parameters have seen."""
        return self._steps

    def take_reports(self) -> tuple[Report, ...]:
        """The reports of the ops since the last call."""
        return ()

    def accuracy(self, images: Images, labels: Labels) -> float:
        with torch.no_grad():
            guesses = self._ddp.module(torch.from_numpy(images)).argmax(1).numpy()
        return float((guesses == labels).mean())

    def drift(self) -> float:
        """The distance from the parameters of rank 0, relative to their norm. Every rank calls it."""
        own = torch.cat([p.detach().flatten() for p in self._ddp.parameters()]).double()
        first = own.clone()
        dist.broadcast(first, 0)
        return float((own - first).norm() / first.norm())

    def resync(self) -> None:
        """Make all replicas equal. With plain DDP they always are."""

    def close(self) -> None:
        dist.destroy_process_group()


class TailcutTrainer(GlooTrainer):
    """The same classifier with tailcut attached."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._attachment = attach(self._ddp, setup.config, self._optimizer)
        if not self._attachment.enabled:
            raise ConfigError("TAILCUT_DISABLE is set: both sides of the demo would be Gloo; unset it")

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return self._attachment.batches(batches)

    @property
    def steps(self) -> int:
        return self._attachment.step

    def take_reports(self) -> tuple[Report, ...]:
        reports = tuple(self._attachment.reports)
        self._attachment.reports.clear()
        return reports

    def resync(self) -> None:
        self._attachment.resync()

    def close(self) -> None:
        self._attachment.close()
        super().close()


SIDES = {"tailcut": TailcutTrainer, "gloo": GlooTrainer}


def _mlp(layers: Sequence[int]) -> nn.Module:
    linear = [nn.Linear(width, after) for width, after in itertools.pairwise(layers)]
    between = [module for layer in linear for module in (layer, nn.ReLU())]
    return nn.Sequential(*between[:-1])
