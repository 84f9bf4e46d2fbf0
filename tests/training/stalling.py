"""Training with a collective of its own in every step, and a rank that stands still in the middle."""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tests.training.common import (
    RANK,
    heard_warnings,
    join_group,
    loss_of,
    perceptron,
    report,
    tailcut_threads,
)

STEPS = 8
DEADLINE_S = 0.3


def train(ddp: DistributedDataParallel, gather: bool) -> None:
    figures = [torch.zeros(1) for _ in range(dist.get_world_size())]
    for step in range(STEPS):
        loss = loss_of(ddp, step)
        loss.backward()
        if RANK == 1 and step == STEPS // 2:
            threading.Event().wait(5 * DEADLINE_S)  # the fault under test
        if gather:
            dist.all_gather(figures, loss.detach().reshape(1))


join_group()
model = DistributedDataParallel(perceptron())
with heard_warnings() as heard, tailcut.attach(model, deadline_s=DEADLINE_S) as attachment:
    train(model, gather=sys.argv[1] == "gather")
    stats = attachment.stats()
    if sys.argv[1] != "gather":
        attachment.resync()  # waits for every rank too, because it was asked to
        stats = attachment.stats()
report(
    {
        "warnings": [text for text in heard if "outside tailcut" in text],
        "stalls": stats.outside_stalls,
        "stalled_s": stats.outside_stalled_s,
        "threads": tailcut_threads(),
    }
)
dist.destroy_process_group()
