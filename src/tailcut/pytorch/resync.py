"""Replicas made equal again: everything that training changes, copied from one rank, reliably.

Through the process group that DDP was given, so it waits for every rank and loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def copy_from(source: int, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None) -> None:
    """Every rank calls it; ``source`` is a rank of DDP's process group."""
    group = ddp.process_group
    root = dist.get_global_rank(group, source)
    tensors = [*ddp.module.parameters(), *ddp.module.buffers()]
    if optimizer is not None:
        holders = [*_states(optimizer), *optimizer.param_groups]  # a learning rate may be a tensor too
        tensors += [value for held in holders for value in held.values() if torch.is_tensor(value)]
        _copy_plain_values(root, group, optimizer)
    with torch.no_grad():
        for tensor in tensors:
            # Adam keeps its step counts on the host, where NCCL alone cannot go.
            contiguous = tensor.detach().to(ddp.device).contiguous()
            dist.broadcast(contiguous, root, group=group)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(contiguous)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """In the order of the parameters, which is the same on all ranks."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                yield optimizer.state[parameter]


def _copy_plain_values(root: int, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer) -> None:
    """Step counts and hyperparameters that are not tensors, as some optimizers and schedulers keep them."""
    ours: list[Any] = [
        [{k: v for k, v in state.items() if not torch.is_tensor(v)} for state in _states(optimizer)],
        [
            {k: v for k, v in g.items() if k != "params" and not torch.is_tensor(v)}
            for g in optimizer.param_groups
        ],
    ]
    dist.broadcast_object_list(ours, root, group=group)
    for state, values in zip(_states(optimizer), ours[0], strict=True):
        state.update(values)
    for target, values in zip(optimizer.param_groups, ours[1], strict=True):
        target.update(values)
