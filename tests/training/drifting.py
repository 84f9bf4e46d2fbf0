"""Replicas that are disturbed while they train: how far apart they are said to be, and how they heal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tailcut import Attachment, Config
from tests.training.common import PATIENT, RANK, RANKS, Cases, loss_of, perceptron, replica_digest, values

case = Cases()

MOST_STEPS = 3000
"""Only what never heals takes longer."""

NOISE = 0.01

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Training:
    """One replica of a model of several blocks."""

    def __init__(self, make: Optimizer, config: Config, width: int = 300, **options: Any) -> None:
        self.ddp = DistributedDataParallel(perceptron(width), bucket_cap_mb=0.2)
        self.optimizer = make(self.ddp.parameters())
        self.attachment: Attachment = tailcut.attach(self.ddp, config, self.optimizer, **options)
        self.steps = 0

    def step(self, count: int = 1, between: Callable[[], object] = lambda: None) -> None:
        """``between`` the backward pass and the optimizer's step. A rank that was behind skips some."""
        self.steps += count
        while self.attachment.step < self.steps:
            self.optimizer.zero_grad()
            loss_of(self.ddp, self.attachment.step).backward()
            between()
            self.optimizer.step()

    def apart(self) -> float:
        """The truth: how far this replica is from that of the next rank."""
        own = values(self.ddp).double()
        everybody = [torch.empty_like(own) for _ in range(RANKS)]
        dist.all_gather(everybody, own)
        return float((own - everybody[(RANK + 1) % RANKS]).norm() / own.norm())

    def heal(self, enough: float) -> list[float]:
        """Train until the replicas are together again. Returns what the stats said on the way."""
        said = []
        while self.steps < MOST_STEPS:
            for _ in range(5):
                self.step()
                said.append(self.attachment.stats().drift)
            together = torch.tensor([self.apart() <= enough], dtype=torch.int32)
            dist.all_reduce(together, dist.ReduceOp.MIN)  # all stop at once
            if together.item():
                break
        return said


def disturb(training: Training, *, states: bool) -> None:
    """Relative noise on the last rank, as if it had missed updates."""
    if RANK != RANKS - 1:
        return
    torch.manual_seed(7)
    tensors: list[torch.Tensor] = list(training.ddp.parameters())
    if states:
        for state in training.optimizer.state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value) and value.dim()]
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(1 + NOISE * torch.randn_like(tensor))


def healed(make: Optimizer, bound: float, enough: float) -> dict[str, Any]:
    training = Training(make, Config(deadline_s=60.0, drift_bound=bound))
    training.step(6)
    disturb(training, states=True)
    began, truth = training.steps, training.apart()
    said = training.heal(enough)
    stats = training.attachment.stats()
    result = {
        "truth": truth,
        "said": max(said),
        "apart": training.apart(),
        "steps": training.steps - began,
        "digest": replica_digest(training.ddp),
        "blocks": stats.resynced_blocks,
        "copied_bytes": stats.resynced_bytes,
        "gradient_bytes": 4 * stats.coordinates,
        "state_bytes": stats.state_bytes,
        "finite": bool(values(training.ddp).isfinite().all()),
        "text": str(stats),
    }
    training.attachment.close()
    return result


@case
def heals_to_the_last_bit_when_nothing_moves() -> dict[str, Any]:
    return healed(lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9), 1.0, 0.0)


@case
def heals_while_momentum_trains() -> dict[str, Any]:
    return healed(momentum, 1.0, 1e-6)


@case
def heals_while_adamw_trains() -> dict[str, Any]:
    return healed(lambda p: torch.optim.AdamW(p, lr=3e-4), 1.0, 1e-6)


@case
def heals_soon_beyond_the_bound() -> dict[str, Any]:
    return healed(lambda p: torch.optim.AdamW(p, lr=3e-4), 1e-3, 1e-5)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _calm(config: Config) -> dict[str, Any]:
    training = Training(lambda p: torch.optim.AdamW(p, lr=1e-3), config)
    training.step(400)
    stats = training.attachment.stats()
    training.attachment.close()
    return {
        "digest": replica_digest(training.ddp, training.optimizer),
        "drift": stats.drift,
        "blocks": stats.resynced_blocks,
        "state_bytes": stats.state_bytes,
        "gradient_bytes": 4 * stats.coordinates,
        "text": str(stats),
    }


@case
def without_loss() -> dict[str, Any]:
    return _calm(PATIENT)


@case
def turned_off() -> dict[str, Any]:
    return _calm(Config(deadline_s=60.0, drift_bound=0.0))


@case
def resync_copies_what_differs() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**RANK)
    training = Training(lambda p: torch.optim.AdamW(p, lr=1e-3), PATIENT, width=1200, scaler=scaler)
    training.step(2)
    copied = []
    attachment = training.attachment
    for disturbed in (0, 1):
        if disturbed == RANK:
            with torch.no_grad():
                training.ddp.module[2].bias.add_(1)
        attachment.resync(source=1)
        copied.append(attachment.stats().resynced_bytes)
    attachment.before_checkpoint()
    copied.append(attachment.stats().resynced_bytes)
    digests = [replica_digest(training.ddp, training.optimizer)]
    scale = scaler.get_scale()
    training.step(2)
    digests.append(replica_digest(training.ddp, training.optimizer))
    attachment.close()
    return {
        "copied_bytes": copied,
        "run_bytes": 1 << 20,
        "all_bytes": 3 * 4 * len(values(training.ddp)),
        "digests": digests,
        "scale": scale,
    }


if __name__ == "__main__":
    case.run(sys.argv[1:])
