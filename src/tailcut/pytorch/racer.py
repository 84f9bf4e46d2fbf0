"""One rank of a race: a workload under DDP, its gradients averaged as its side says.

Owns the default process group of this process. Knows nothing of clocks, testbeds or files.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.pytorch.attach import attach
from tailcut.pytorch.hooks import distributed, gloo_op_s
from tailcut.pytorch.workloads import Workload
from tailcut.stats import Stats

STORE_LIMIT = timedelta(hours=1)
DEADLINE_STEPS, DEADLINE_SHARE = 20, 0.95
"""OptiReduce takes t_B from so many iterations over TCP: so large a share of them took at most that."""


def join(rank: int, ranks: int, address: str, port: int) -> TCPStore:
    """Make Gloo the default process group. Each rank computes with one thread: others share its cores."""
    torch.set_num_threads(1)
    store = TCPStore(address, port, ranks, is_master=rank == 0, timeout=STORE_LIMIT)
    dist.init_process_group("gloo", store=PrefixStore("ddp", store), rank=rank, world_size=ranks)
    return store


class Racer:
    """The replica of this rank."""

    def __init__(
        self,
        workload: Workload,
        kind: str,
        config: Mapping[str, Any],
        seed: int,
        *,
        measured_deadline: bool = False,
    ) -> None:
        self.workload = workload
        self._seed = seed
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._steps = 0
        self.links: dict[int, Counter[str]] = {}
        """By source: coordinates that were to come to this rank, and those that did not come in time."""
        self._schedule: torch.optim.lr_scheduler.LRScheduler | None = None
        if measured_deadline:
            config = {**config, "deadline_s": self._measured_deadline_s()}
        torch.manual_seed(seed)
        self._ddp = distributed(workload.model(), kind)
        self._optimizer = workload.optimizer(self._ddp)
        self._attachment = None
        if kind == "tailcut":
            self._attachment = attach(self._ddp, Config(**config), self._optimizer)
            if not self._attachment.enabled:
                raise ConfigError("TAILCUT_DISABLE is set: the side tailcut would be Gloo; unset it")

    @property
    def steps(self) -> int:
        """The group's steps so far. A rank that was behind may have skipped some."""
        return self._attachment.step if self._attachment else self._steps

    def step(self) -> float:
        """Do one step with this rank's part of the batch, and return its loss."""
        places = self.workload.places(self._seed, self.steps, self._rank, self._ranks)
        self._optimizer.zero_grad()
        loss = self.workload.loss(self._ddp, places)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._steps += 1
        if self._schedule:
            self._schedule.step()
        return loss.item()

    def anneal(self, steps: int) -> None:
        """Let the learning rate fall to 0 over the next steps."""
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, 0.0, steps)

    def evaluate(self, *, whole: bool = False) -> float:
        return self.workload.evaluate(self._ddp.module, whole=whole)

    def take_op_times_s(self) -> list[float]:
        """How long tailcut's ops since the last call took. What they lacked is added to ``links``."""
        times_s = []
        for report in self._attachment.reports if self._attachment else ():
            times_s.append(report.elapsed_s)
            for source, link in zip(report.members, report.links, strict=True):
                counts = self.links.setdefault(source, Counter())
                counts.update(contributions=link.scatter.coords, late_contributions=link.scatter.missing)
                counts.update(means=link.gather.coords, late_means=link.gather.missing)
        if self._attachment:
            self._attachment.reports.clear()
        return times_s

    @property
    def config(self) -> Config | None:
        """The effective configuration of tailcut."""
        return self._attachment.config if self._attachment else None

    def stats(self) -> Stats | None:
        """What tailcut has cost."""
        return self._attachment.stats() if self._attachment else None

    def make_equal(self) -> None:
        """Make all replicas equal, as before a checkpoint. It waits for every rank."""
        if self._attachment:
            self._attachment.before_checkpoint()

    def fingerprint(self) -> str:
        """Replicas that are equal bit for bit have the same."""
        values = self._ddp.module.state_dict().values()
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        if self._attachment:
            self._attachment.close()

    def _measured_deadline_s(self) -> float:
        """t_B as OptiReduce takes it, except that the iterations are Gloo's."""

        def steps(network: nn.Module) -> None:
            for step in range(DEADLINE_STEPS):
                places = self.workload.places(self._seed, step, self._rank, self._ranks)
                self.workload.loss(network, places).backward()  # type: ignore[no-untyped-call]

        torch.manual_seed(self._seed)
        return gloo_op_s(self.workload.model(), steps, DEADLINE_SHARE)


class LastStep:
    """The last step, which rank 0 decides. The others hear of it in a thread of their own, so no step waits
    for it."""

    def __init__(self, rank: int, store: TCPStore, number: int | None) -> None:
        self.number = number
        self._store = store
        if rank != 0 and number is None:
            threading.Thread(target=self._listen, daemon=True).start()

    def decide(self, number: int) -> None:
        self.number = number
        self._store.set("last step", str(number))

    def _listen(self) -> None:
        # It has a connection of its own, because one that waits for a key does nothing else.
        own = TCPStore(self._store.host, self._store.port, timeout=STORE_LIMIT)
        self.number = int(own.get("last step"))
