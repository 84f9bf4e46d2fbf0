"""What is inside the objects that frameworks hand out: the DDP model, and the optimizers of torch.

Knows torch.compile, Fabric, Lightning and Accelerate by the names under which they keep what they wrap, so
that none of them has to be installed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tailcut.errors import ConfigError

MODEL_WRAPPERS = ("_orig_mod", "_forward_module")
"""Where torch.compile and Fabric keep the model."""

OPTIMIZER_WRAPPERS = ("optimizer", "_optimizer")
"""Where Fabric, Accelerate and Lightning keep the optimizer."""


def ddp_of(model: Any) -> DistributedDataParallel:
    """The DDP model that this is or wraps."""
    inner = model
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        children = dict(inner.named_children()) if isinstance(inner, torch.nn.Module) else {}
        inner = next((children[name] for name in MODEL_WRAPPERS if name in children), None)
    if inner is None:
        raise ConfigError(
            f"attach takes a DistributedDataParallel model, not {type(model).__name__}; {_remedy()}"
        )
    return inner


def optimizer_of(wrapped: Any) -> torch.optim.Optimizer:
    """The optimizer of torch that this is or wraps: only its own steps call the hooks of a step."""
    inner = wrapped
    while True:
        held = (vars(inner).get(name) for name in OPTIMIZER_WRAPPERS) if hasattr(inner, "__dict__") else ()
        found = next((entry for entry in held if isinstance(entry, torch.optim.Optimizer)), None)
        if found is None:
            break
        inner = found
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(wrapped).__name__}; pass a torch.optim.Optimizer, or several"
        )
    return inner


def _remedy() -> str:
    started = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        return "wrap the model in DDP first; for HSDP see docs/frameworks.md"
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        return (
            "this is the only process: `accelerate launch --cpu` starts a single one whatever "
            "--num_processes says; start several with `torchrun --nproc-per-node=N script.py`"
        )
    return "this is the only process; start several, for instance with torchrun --nproc-per-node=2"
