"""What a process group of the backend "tailcut" is made of."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.training.common import RANK, report, tailcut_threads, udp_sockets

dist.init_process_group("tailcut")
tensor = torch.full((1 << 16,), float(RANK))
dist.all_reduce(tensor, dist.ReduceOp.AVG)
total = torch.full((1,), float(RANK))
dist.all_reduce(total)
report(
    {
        # Only its name is kept: torch aborts in some exits when a Gloo backend is still referred to.
        "backend": type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__,
        "mean": float(tensor[0]),
        "sum": float(total),
        "threads": tailcut_threads(),
        "sockets": udp_sockets(),
    }
)
dist.destroy_process_group()
