"""What every workload has: a model, an optimizer, batches that have an address, a figure of merit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Facts:
    """What is said about a workload in results."""

    name: str
    source: str
    """What it learns from."""
    parameters: int
    batch: int
    """Examples per step, of all ranks together."""
    figure: str
    """What ``evaluate`` returns."""
    higher_is_better: bool
    target: float
    """The figure that a race is about."""


class Workload(ABC):
    """A model and what it learns. The weights of a new model follow torch's seed."""

    name: str
    source: str
    batch: int
    figure = "accuracy"
    higher_is_better = True
    target: float

    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...

    @abstractmethod
    def examples(self) -> int:
        """How many there are to learn from."""

    @abstractmethod
    def loss(self, network: nn.Module, places: torch.Tensor) -> torch.Tensor:
        """The loss over the examples at these places."""

    @abstractmethod
    def figure_of(self, model: nn.Module, whole: bool) -> float: ...

    def places(self, seed: int, step: int, rank: int, ranks: int) -> torch.Tensor:
        """A rank's part of a step's batch. The batch is the same for any number of ranks."""
        chosen = np.random.default_rng((seed, step)).integers(self.examples(), size=self.batch)
        return torch.from_numpy(chosen[rank::ranks])

    def evaluate(self, model: nn.Module, *, whole: bool = False) -> float:
        """The figure of merit on examples that were not learned from: on a part of them, or on the whole."""
        model.eval()
        try:
            with torch.inference_mode():
                return self.figure_of(model, whole)
        finally:
            model.train()

    def facts(self) -> Facts:
        parameters = sum(parameter.numel() for parameter in self.model().parameters())
        return Facts(
            *(self.name, self.source, parameters, self.batch),
            *(self.figure, self.higher_is_better, self.target),
        )
