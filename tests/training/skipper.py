"""A rank that trains at the word of a test, and takes the means of steps that it has missed."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tailcut import Config
from tests.training.common import RANK, hear, join_group, loss_of, perceptron, replica_digest, say


class Training:
    """A model of several buckets. ``scaled`` is AdamW with a loss scale, clipping and a schedule."""

    def __init__(self, config: dict[str, Any], scaled: bool) -> None:
        self.forwards = 0
        model = perceptron(width=512)  # its first bucket is that of DDP, of 1 MiB
        model.register_forward_pre_hook(self._count)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=0.2)
        self.scaler: torch.amp.GradScaler | None = None
        self.optimizer: torch.optim.Optimizer
        take_step = None
        if scaled:
            self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
            take_step = self.step
        else:
            self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.attachment = tailcut.attach(
            self.ddp, Config(**config), self.optimizer, scaler=self.scaler, step=take_step
        )
        self.batches = self.attachment.batches(itertools.count())
        self.batch = -1

    def _count(self, *_: object) -> None:
        self.forwards += 1

    def step(self) -> None:
        """All that stands between backward and zero_grad."""
        if self.scaler is None:
            self.optimizer.step()
            return
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.ddp.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def backward(self, poisoned: bool) -> None:
        self.batch = next(self.batches)
        loss = loss_of(self.ddp, self.batch)
        if poisoned:
            loss = loss * torch.inf
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def state(self) -> dict[str, Any]:
        stats = self.attachment.stats()
        reports = list(self.attachment.reports)[-stats.ops :]
        return {
            "step": self.attachment.step,
            "buckets": len(self.attachment._passes.form),
            "skipped": stats.skipped_steps,
            "forwards": self.forwards,
            "batch": self.batch,
            "awaited": [link.awaited for link in reports[-1].links],
            "ended_by_deadline": sum(report.ended_by == "deadline" for report in reports),
            "scale": self.scaler.get_scale() if self.scaler else 0.0,
            "lr": self.schedule.get_last_lr(),
            "digest": replica_digest(self.ddp, self.optimizer),
            "gradients": sum(p.grad is not None for p in self.ddp.parameters()),
        }


def main() -> None:
    join_group(f"file://{Path('rendezvous').absolute()}")
    training = Training(json.loads(sys.argv[1]), scaled="scaled" in sys.argv)
    group = training.attachment._reducer.group if training.attachment._reducer else None
    assert group is not None
    say("attached")
    while (word := hear()) != "end":
        if word in ("step", "poison"):
            training.backward(poisoned=word == "poison" and RANK == 0)
            training.step()
            training.optimizer.zero_grad()
        elif word == "accumulate":
            with training.ddp.no_sync():
                training.backward(poisoned=False)
        elif word == "evaluate":
            with torch.no_grad():
                loss_of(training.ddp.module.eval(), 0)
            training.ddp.train()
        elif word == "resync":
            training.attachment.resync()
        else:  # until it has heard that it is so many ops behind
            while group.behind_ops < int(word):
                pass
        say(training.state())
    with contextlib.suppress(BrokenPipeError):
        training.attachment.close()


if __name__ == "__main__":
    main()
