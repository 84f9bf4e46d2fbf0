"""HSDP: sharded over Gloo inside a pair, averaged over tailcut across the replicas, by backend or by hook."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tailcut import Config
from tailcut.pytorch import attach_replicas, stats_of
from tailcut.stats import Stats
from tests.training.common import PATIENT, RANK, RANKS, Cases, refusal

case = Cases()
WIDTH = 512


def mesh_of(override: dict[str, Any]) -> Any:
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=names, backend_override=override)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 256))


def trained(model: nn.Module) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(RANK)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])  # type: ignore[attr-defined]


def by_backend(replicate: Any, **options: Any) -> tuple[torch.Tensor, Any]:
    mesh = mesh_of({"replicate": replicate, "shard": "gloo"})
    return trained(fully_shard(network(), mesh=mesh, **options)), mesh.get_group("replicate")


def compared(ours: torch.Tensor, stats: Stats, **options: Any) -> dict[str, Any]:
    plain, _ = by_backend("gloo", **options)
    return {
        "difference": float((plain - ours).abs().max()),
        "ops": stats.ops,
        "sent_bytes": stats.traffic.sent_bytes,
        "lost": stats.lost_coordinates,
    }


@case
def backend_with_its_configuration() -> dict[str, Any]:
    ours, group = by_backend(("tailcut", Config(deadline_s=60, bound_from_bytes=1 << 10)))
    return compared(ours, stats_of(group))


@case
def hook() -> dict[str, Any]:
    mesh = mesh_of({"replicate": "gloo", "shard": "gloo"})
    model = fully_shard(network(), mesh=mesh["shard"])
    replicas = attach_replicas(model, mesh.get_group("replicate"), PATIENT)
    ours = trained(model)
    stats = replicas.stats()
    replicas.close()
    return compared(ours, stats)


@case
def sixteen_bits() -> dict[str, Any]:
    """As between hosts, where values travel as planes: bfloat16 takes 16 of them."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    config = Config(deadline_s=60, codec="planes", bound_from_bytes=0)
    ours, group = by_backend(("tailcut", config), mp_policy=policy)
    return {**compared(ours, stats_of(group), mp_policy=policy), "coordinates": ours.numel() // (RANKS // 2)}


@case
def refusals() -> dict[str, Any]:
    mesh = mesh_of({"replicate": "gloo", "shard": "gloo"})
    group = mesh.get_group("replicate")
    return {
        "whole": refusal(lambda: attach_replicas(network(), group)),
        "twice": refusal(lambda: attach_replicas(fully_shard(network(), mesh=mesh), group)),
    }


if __name__ == "__main__":
    case.run(sys.argv[1:])
