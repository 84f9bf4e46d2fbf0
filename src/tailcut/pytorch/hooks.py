"""DDP with the ways of averaging gradients that are compared: Gloo, torch's hooks, tailcut, and none."""
# No postponed annotations: DDP compares its hook's annotations with the classes themselves.

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

POWERSGD_RANK = 4
ONE_BUCKET_MB = 1000
"""PowerSGD's collectives follow each other in callbacks, so with several buckets their order would differ by
rank."""


def bf16_hook(process_group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replaces torch's own hook, which DDP recognizes by its name and accepts only with CUDA; Gloo can do it
    too."""
    return default_hooks.bf16_compress_hook(process_group, bucket)


def no_exchange_hook(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Every rank keeps its own gradients: what a step takes if averaging takes no time."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def distributed(model: nn.Module, kind: str) -> DistributedDataParallel:
    """The model under DDP, whose gradients Gloo averages, or one of torch's hooks over Gloo, or nobody.

    Buffers are not broadcast: a collective in every step would hide what is compared.
    """
    if kind == "powersgd":
        ddp = DistributedDataParallel(model, broadcast_buffers=False, bucket_cap_mb=ONE_BUCKET_MB)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    if kind == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "bf16":
        ddp.register_comm_hook(None, bf16_hook)
    elif kind == "alone":
        ddp.register_comm_hook(None, no_exchange_hook)
    return ddp


def gloo_op_s(model: nn.Module, steps: Callable[[nn.Module], object], share: float) -> float:
    """How long a bucket takes over Gloo: this share of them is not longer, on the slowest rank."""
    times_s: list[float] = []

    def timed(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        begun_s = time.perf_counter()

        def ended(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            times_s.append(time.perf_counter() - begun_s)
            return future.value()

        return default_hooks.allreduce_hook(None, bucket).then(ended)  # type: ignore[arg-type]

    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    ddp.register_comm_hook(None, timed)
    steps(ddp)
    slowest = torch.tensor([float(np.quantile(times_s, share))])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
