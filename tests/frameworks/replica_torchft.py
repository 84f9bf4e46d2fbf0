"""One replica of torchft. It does a step for every "go" that it hears, and says what that has cost."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torchft import Manager
from torchft.ddp import DistributedDataParallel
from torchft.optim import OptimizerWrapper

from tailcut import Config
from tailcut.torchft import ProcessGroupTailcut
from tests.frameworks.checks import DEADLINE_S
from tests.training.common import digest, hear, perceptron, say


def main(name: str, lighthouse: str) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = perceptron(256)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    process_group = ProcessGroupTailcut(Config(deadline_s=DEADLINE_S, bound_from_bytes=0))
    manager = Manager(
        pg=process_group,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="127.0.0.1",
    )
    train(manager, process_group, model, optimizer)
    manager.shutdown()


def train(
    manager: Manager, process_group: ProcessGroupTailcut, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    ddp, wrapped = DistributedDataParallel(manager, model), OptimizerWrapper(manager, optimizer)
    say("ready")
    while hear() == "go":
        wrapped.zero_grad()  # waits for the quorum
        inputs = torch.randn(8, 128, generator=torch.Generator().manual_seed(manager.current_step()))
        loss = ddp(inputs).square().mean()
        began_s = time.monotonic()
        loss.backward()
        took_s = time.monotonic() - began_s
        wrapped.step()
        say(
            {
                "step": manager.current_step(),
                "took_s": took_s,
                "replicas": manager.num_participants(),
                "ops": process_group.stats().ops,
                "digest": digest(*model.parameters()),
            }
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
