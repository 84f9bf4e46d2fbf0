"""A plain Gloo process group as an allreduce on numpy arrays: what tailcut is measured against.

Owns this process's default process group. Knows nothing of tailcut's groups.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tailcut.errors import ConfigError

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise ConfigError(
        "comparing with Gloo needs torch, which is not installed: pip install tailcut[bench]"
    ) from error


def join_gloo(rank: int, world_size: int, rendezvous: Path) -> None:
    """Make Gloo over loopback the default process group; one thread, as there are as many ranks as cores."""
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
