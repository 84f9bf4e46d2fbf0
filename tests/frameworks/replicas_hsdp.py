"""Two replicas of two shards each under torchrun, in which one rank freezes."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tailcut import Config
from tailcut.pytorch import attach_replicas
from tests.frameworks.checks import DEADLINE_S
from tests.frameworks.common import Watch
from tests.training.common import INPUTS, OUTPUTS, join_group, perceptron, report

STEPS = 150
NAMES = ("replicate", "shard")


def backend() -> dict[str, Any]:
    config = Config(deadline_s=DEADLINE_S, bound_from_bytes=0)
    override: dict[Any, Any] = {"replicate": ("tailcut", config)}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES, backend_override=override)
    return train(fully_shard(perceptron(256), mesh=mesh))


def hook() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    model = fully_shard(perceptron(256), mesh=mesh["shard"])
    replicas = attach_replicas(model, mesh.get_group("replicate"), deadline_s=DEADLINE_S)
    result = train(model)
    replicas.close()
    return result


def train(model: nn.Module) -> dict[str, Any]:
    watch = Watch(freeze=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(8, INPUTS)), torch.randn(8, OUTPUTS)).backward()
        optimizer.step()
        watch.step()
    return watch.result()


if __name__ == "__main__":
    join_group()
    [way] = sys.argv[1:]
    report({"frozen": {"backend": backend, "hook": hook}[way]()})
    dist.barrier()
    dist.destroy_process_group()
