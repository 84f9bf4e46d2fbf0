"""Makes replicas equal again: copies everything that training changes from one rank to all others.

It uses the process group that DDP was given, so it waits for every rank and loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def copy_from(source: int, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None) -> None:
    """Copy from ``source``, a rank of DDP's process group. Every rank calls it."""
    group = ddp.process_group
    root = dist.get_global_rank(group, source)
    tensors = [*ddp.module.parameters(), *ddp.module.buffers()]
    if optimizer is not None:
        tensors += _agree_on_shape(root, group, optimizer)
    with torch.no_grad():
        for tensor in tensors:
            # Adam keeps its step counts on the host, which NCCL does not reach.
            contiguous = tensor.detach().to(ddp.device).contiguous()
            dist.broadcast(contiguous, root, group=group)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(contiguous)


class _Empty(NamedTuple):
    """It stands for a tensor whose values come later."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


def _agree_on_shape(
    root: int, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    """Give every optimizer the entries of the source: plain values, and tensors that are filled later.

    A rank that has just joined may have no state at all, and a rank that was further may have more.
    """
    shape: list[Any] = [[_without_values(held) for held, _ in _holders(optimizer)]]
    dist.broadcast_object_list(shape, root, group=group)
    tensors = []
    for (held, parameter), entries in zip(_holders(optimizer), shape[0], strict=True):
        for name in set(held) - set(entries) - {"params"}:
            del held[name]
        for name, entry in entries.items():
            if isinstance(entry, _Empty):
                device = "cpu" if entry.on_host or parameter is None else parameter.device
                if _without_values(held).get(name) != entry:
                    held[name] = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
                tensors.append(held[name])
            else:
                held[name] = entry
    return tensors


def _holders(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """The groups with their learning rates, and the state of each parameter, in one order on all ranks."""
    for group in optimizer.param_groups:
        yield group, None
        for parameter in group["params"]:
            yield optimizer.state[parameter], parameter  # an empty state is made if there is none


def _without_values(held: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _Empty(value.shape, value.dtype, value.device.type == "cpu")
        if torch.is_tensor(value)
        else value
        for name, value in held.items()
        if name != "params"
    }
