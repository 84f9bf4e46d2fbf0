"""Trains, and writes down what its parameters are after every step: the same for a run and for its replay."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tests.training.common import RANK, join_group, loss_of, perceptron, replica_digest

directory, steps = Path(sys.argv[1]), int(sys.argv[2])
settings = json.loads(sys.argv[3])
trouble = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
"""By rank: at which step it stands still for a while, evaluates or dies. A replay has none."""
disturbed = settings.pop("disturbed", {})
"""By rank: at which step its parameters become others than those of the others."""


def freeze(seconds: float) -> None:
    """Another process thaws this one."""
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def evaluate(seconds: float) -> None:
    """For as long as that takes, which is never as long in a replay."""
    until_s = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until_s:
            loss_of(ddp.eval(), 0)
    ddp.train()


join_group()
ddp = DistributedDataParallel(perceptron(width=256), bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
attachment = tailcut.attach(ddp, optimizer=optimizer, **settings)
digests: dict[int, str] = {}
while attachment.step < steps:
    mine = trouble.get(str(RANK), {})
    if attachment.step == mine.get("freeze_at"):
        freeze(mine["freeze_s"])
    if attachment.step == mine.get("die_at"):  # its gradient is the last: the other buckets are on their way
        next(ddp.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    if attachment.step == disturbed.get(str(RANK), {}).get("disturb_at"):
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.mul_(1.05)
    if mine.get("evaluate_every") and attachment.step % mine["evaluate_every"] == 0:
        evaluate(mine["evaluate_s"])
    optimizer.zero_grad()
    loss_of(ddp, attachment.step).backward()
    optimizer.step()
    digests[attachment.step] = replica_digest(ddp, optimizer)
    (directory / f"{RANK}.json").write_text(json.dumps(digests))
attachment.close()
