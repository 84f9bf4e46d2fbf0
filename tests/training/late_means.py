"""Training in which a part of the means is late, with what does not heal by itself."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from tailcut import Config
from tests.training.common import Cases, replica_digest
from tests.training.drifting import Optimizer, Training

case = Cases()

STEPS, CHECKED = 200, 25
"""All of them, and from one look at the drift to the next."""


def late(make: Optimizer, *, clip: float = math.inf, warm_up: int = 1) -> dict[str, Any]:
    """The network makes a part of the means late."""
    training = Training(make, Config())
    schedule = torch.optim.lr_scheduler.LinearLR(training.optimizer, 1 / warm_up, 1.0, warm_up)
    apart = []
    while training.steps < STEPS:
        for _ in range(CHECKED):
            training.step(
                between=lambda: torch.nn.utils.clip_grad_norm_(training.ddp.parameters(), clip),
            )
            schedule.step()
        apart.append(training.apart())
    stats = training.attachment.stats()
    training.attachment.resync()
    result = {
        "apart": apart,
        "carried": stats.carried_means / stats.coordinates,
        "digest": replica_digest(training.ddp, training.optimizer),
    }
    training.attachment.close()
    return result


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@case
def adamw_with_late_means() -> dict[str, Any]:
    return late(lambda p: torch.optim.AdamW(p, lr=1e-4))


@case
def warm_up_with_late_means() -> dict[str, Any]:
    return late(momentum, warm_up=STEPS // 2)


@case
def clipping_with_late_means() -> dict[str, Any]:
    return late(momentum, clip=0.1)


if __name__ == "__main__":
    case.run(sys.argv[1:])
