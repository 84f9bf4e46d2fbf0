"""A Gloo process group as an allreduce on NumPy arrays, plain or with torch's hooks that compress.

Benchmarks measure tailcut against it. Owns the default process group. Knows nothing of tailcut's groups.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tailcut.errors import ConfigError

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
except ImportError as error:
    raise ConfigError(
        "comparing with Gloo needs torch, which is not installed: pip install tailcut[bench]"
    ) from error


def join_gloo(rank: int, world_size: int, rendezvous: Path) -> None:
    """Make Gloo the default process group, over loopback unless GLOO_SOCKET_IFNAME names another network.

    It computes with one thread, because there are as many ranks as cores.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError(
            "this torch was built without Gloo; install one with it: pip install tailcut[bench]"
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)


class GlooGroup:
    """The mean over ranks as DDP takes it from Gloo: one SUM, then a division."""

    def __init__(self, rank: int, world_size: int, rendezvous: Path) -> None:
        self._world_size = world_size
        join_gloo(rank, world_size, rendezvous)

    def allreduce(self, array: npt.NDArray[np.float32]) -> None:
        """Average ``array`` over the ranks, in place; returns when it is done."""
        tensor = torch.from_numpy(array)
        dist.all_reduce(tensor, dist.ReduceOp.SUM)
        tensor /= self._world_size

    def close(self) -> None:
        dist.destroy_process_group()


class _Bucket:
    """An array as DDP shows its buckets to hooks: one parameter, a matrix that is almost square."""

    def __init__(self, array: npt.NDArray[np.float32]) -> None:
        self._buffer = torch.from_numpy(array)
        rows = math.isqrt(array.size)
        while array.size % rows:
            rows -= 1
        self._matrix = self._buffer.view(rows, -1)

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer.copy_(buffer)

    def gradients(self) -> list[torch.Tensor]:
        return [self._matrix]

    def parameters(self) -> list[torch.Tensor]:
        return [self._matrix]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def _power_sgd_state() -> powerSGD_hook.PowerSGDState:
    # These are its own defaults, except that it compresses from the first step: there is no model to warm up.
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


HOOKS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "fp16": (default_hooks.fp16_compress_hook, lambda: None),
    "bf16": (default_hooks.bf16_compress_hook, lambda: None),
    "powersgd": (powerSGD_hook.powerSGD_hook, _power_sgd_state),
}
"""The hooks that torch has for DDP, each with its state."""


class CompressedGlooGroup:
    """The mean over ranks as one of torch's hooks takes it."""

    def __init__(self, rank: int, world_size: int, rendezvous: Path, hook: str) -> None:
        join_gloo(rank, world_size, rendezvous)
        self._hook, make_state = HOOKS[hook]
        self._state = make_state()

    def allreduce(self, array: npt.NDArray[np.float32]) -> None:
        """Average ``array`` over the ranks, in place, with the precision that the hook keeps."""
        bucket = _Bucket(array)
        averaged = self._hook(self._state, bucket).wait()
        if averaged.data_ptr() != bucket.buffer().data_ptr():
            bucket.set_buffer(averaged)

    def close(self) -> None:
        dist.destroy_process_group()
