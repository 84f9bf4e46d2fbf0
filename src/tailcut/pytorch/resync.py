"""Makes replicas equal again: copies what differs of everything that training changes from one rank to all.

It uses the process group that DDP was given, so it waits for every rank and loses nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tailcut import _native

RUN_BYTES = 1 << 20
"""Tensors are compared and copied in runs of this length."""

BROADCAST_BYTES = 32 << 20
"""Runs are copied together, so many at a time: a broadcast takes a round trip, and memory."""


class Replica(NamedTuple):
    """What training changes at one rank."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer | None
    scaler: Any
    """A ``torch.amp.GradScaler``, or None."""


def copy_from(source: int, replica: Replica, count: int) -> tuple[int, int]:
    """Copy from ``source``, a rank of DDP's process group. Every rank calls it.

    Returns how many bytes of tensors were copied, and the ``count`` of the source.
    """
    ddp, optimizer, scaler = replica
    group = ddp.process_group
    root = dist.get_global_rank(group, source)
    if optimizer is not None:
        shape: list[Any] = [shape_of(optimizer)]
        dist.broadcast_object_list(shape, root, group=group)
        take_shape(optimizer, shape[0])
    tensors = tensors_of(replica)
    plain: list[Any] = [count, scaler.state_dict() if scaler is not None else None]
    dist.broadcast_object_list(plain, root, group=group)
    if plain[1]:
        scaler.load_state_dict(plain[1])
    with torch.no_grad():
        return _copy_what_differs(tensors, root, ddp), plain[0]


def _copy_what_differs(tensors: list[torch.Tensor], root: int, ddp: DistributedDataParallel) -> int:
    """Bytes copied. Runs that are equal on all ranks are only compared."""
    own = [tensor.detach().contiguous() for tensor in tensors]
    runs = [run for tensor in own for run in torch.split(tensor.view(-1).view(torch.uint8), RUN_BYTES)]
    if not runs:
        return 0
    hashes = torch.tensor([_hash_of(run) for run in runs], device=ddp.device)
    sources = hashes.clone()
    dist.broadcast(sources, root, group=ddp.process_group)
    differs = (hashes != sources).to(torch.int32)
    dist.all_reduce(differs, dist.ReduceOp.MAX, ddp.process_group)
    wanted = [run for run, one in zip(runs, differs.tolist(), strict=True) if one]
    together = BROADCAST_BYTES // RUN_BYTES
    for first in range(0, len(wanted), together):
        _broadcast(wanted[first : first + together], root, ddp)
    for tensor, contiguous in zip(tensors, own, strict=True):
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(contiguous)
    return sum(run.numel() for run in wanted)


def _broadcast(runs: list[torch.Tensor], root: int, ddp: DistributedDataParallel) -> None:
    # Adam keeps its step counts on the host, which NCCL does not reach.
    whole = torch.cat([run.to(ddp.device) for run in runs])
    sizes = [run.numel() for run in runs]
    dist.broadcast(whole, root, group=ddp.process_group)
    for run, copied in zip(runs, torch.split(whole, sizes), strict=True):
        run.copy_(copied)


def hash_of_all(tensors: Iterable[torch.Tensor]) -> int:
    """64 bits of their values, in this order."""
    flat = (tensor.detach().contiguous().view(-1).view(torch.uint8).cpu() for tensor in tensors)
    hashes = np.array([_native.hash_of(values.numpy()) for values in flat], np.uint64)
    return _native.hash_of(hashes.view(np.uint8))


def _hash_of(run: torch.Tensor) -> int:
    digest = hashlib.blake2b(run.cpu().numpy().data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def tensors_of(replica: Replica) -> list[torch.Tensor]:
    """All that has values, in one order on all ranks whose optimizers have the same shape."""
    tensors = [*replica.ddp.module.parameters(), *replica.ddp.module.buffers()]
    if replica.optimizer is not None:
        for held, _ in _holders(replica.optimizer):
            # By name, because a rank may have made its entries in another order.
            tensors += [held[name] for name in sorted(held) if torch.is_tensor(held[name])]
    return tensors


class Empty(NamedTuple):
    """It stands for a tensor whose values come later."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


def shape_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What an optimizer holds: plain values, and tensors without their values."""
    return [_without_values(held) for held, _ in _holders(optimizer)]


def take_shape(optimizer: torch.optim.Optimizer, shape: list[dict[str, Any]]) -> None:
    """Give an optimizer the entries of another: plain values, and tensors that are filled later.

    A rank that has just joined may have no state at all, and a rank that was further may have more.
    """
    for (held, parameter), entries in zip(_holders(optimizer), shape, strict=True):
        for name in set(held) - set(entries) - {"params"}:
            del held[name]
        for name, entry in entries.items():
            if isinstance(entry, Empty):
                device = "cpu" if entry.on_host or parameter is None else parameter.device
                if _without_values(held).get(name) != entry:
                    held[name] = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
            else:
                held[name] = entry


def _holders(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """The groups with their learning rates, and the state of each parameter, in one order on all ranks."""
    for group in optimizer.param_groups:
        yield group, None
        for parameter in group["params"]:
            yield optimizer.state[parameter], parameter  # an empty state is made if there is none


def _without_values(held: dict[str, Any]) -> dict[str, Any]:
    return {
        name: Empty(value.shape, value.dtype, value.device.type == "cpu") if torch.is_tensor(value) else value
        for name, value in held.items()
        if name != "params"
    }
