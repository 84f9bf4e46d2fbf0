"""What a DDP model and tailcut demand of each other: gradients that can be averaged, room for its buckets.

Also warns of what DDP does that still waits for every rank. Looks at the model only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tailcut import notices
from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.pytorch.staging import DTYPES

STEPS_IN_WINDOW = 4
"""The window holds the buckets of at least this many steps: a rank may be late by a backward pass or two."""

BUCKETS_OF_A_STEP = 4
"""``Config.window_ops`` is for steps of so many buckets. A model with more has a window of as many steps."""

MOST_WINDOW_OPS = 1 << 16

POOLED_BUCKETS = 4
"""The pool holds at least this many of the largest buckets: an op needs room for two of its size."""


def check_gradients(ddp: DistributedDataParallel) -> None:
    """Raise ConfigError if some gradients of the model cannot be averaged."""
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:
            raise ConfigError(
                f"the gradients of {name} are {parameter.dtype}, and tailcut averages in float32: "
                "convert the model with .float(), or leave this one to DDP"
            )
    for name, module in ddp.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(
            module, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            raise ConfigError(
                f"{name} has sparse gradients, which tailcut does not average: set sparse=False"
            )
    if getattr(ddp, "_use_python_reducer", False):
        raise ConfigError(
            "torch._dynamo.config.optimize_ddp='python_reducer' reduces parameter by parameter inside the "
            "compiled graph; tailcut needs DDP's buckets: set it to 'ddp_optimizer'"
        )


def check_scaler(scaler: Any) -> None:
    """Raise ConfigError if this is something else than a GradScaler."""
    for method in ("get_scale", "is_enabled", "state_dict"):
        if scaler is not None and not callable(getattr(scaler, method, None)):
            raise ConfigError(
                f"scaler is a {type(scaler).__name__} without {method}(); pass a torch.amp.GradScaler"
            )


def fitting(
    config: Config, ddp: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]
) -> Config:
    """The configuration with at least the room that the steps and buckets of this model need, and with what
    suits its optimizers."""
    parameters: list[torch.nn.Parameter] = [p for p in ddp.module.parameters() if p.requires_grad]
    # DDP closes a bucket that reaches its cap. One may be open for each dtype, and the first one is small.
    cap_bytes = max(1, int(ddp.bucket_bytes_cap))  # 0 is allowed, and makes a bucket for every parameter
    gradient_bytes = sum(p.numel() * p.element_size() for p in parameters)
    buckets = min(len(parameters), gradient_bytes // cap_bytes + len({p.dtype for p in parameters}) + 1)
    bucket_bytes = cap_bytes + max((4 * p.numel() for p in parameters), default=0)
    steps = max(STEPS_IN_WINDOW, config.window_ops // BUCKETS_OF_A_STEP)
    return replace(
        config,
        window_ops=max(config.window_ops, min(steps * buckets, MOST_WINDOW_OPS)),
        pool_bytes=max(config.pool_bytes, POOLED_BUCKETS * bucket_bytes),
        residue=_residue(optimizers) if config.residue == "auto" else config.residue,
    )


def _residue(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """SGD is linear: its steps add up to the same, in whichever of them a part of a gradient comes."""
    linear = optimizers and all(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers)
    return "carry" if linear else "discard"


def warn_of_what_blocks(ddp: DistributedDataParallel) -> None:
    """Warn of what DDP and its modules send by themselves: that still waits for every rank."""
    blocking = []
    if ddp.broadcast_buffers and ddp.modules_buffers:
        switch = "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"
        blocking.append(f"the broadcast of buffers before every forward pass ({switch}=False)")
    if ddp.find_unused_parameters and not ddp.static_graph:
        blocking.append("the map of used parameters (find_unused_parameters=False, or static_graph=True)")
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in ddp.module.modules()):
        blocking.append("the statistics of SyncBatchNorm (BatchNorm, or a norm without statistics)")
    if blocking:
        notices.warn(
            "tailcut bounds the gradients. A dead or frozen rank still stops the others in: "
            + "; ".join(blocking)
        )
