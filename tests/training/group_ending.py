"""A process group of the backend "tailcut" with an op behind it, and then the end that is asked for."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from tests.training.common import join_group

init_method, ending = sys.argv[1:]
join_group(init_method, "tailcut")
dist.all_reduce(torch.ones(1 << 16), dist.ReduceOp.AVG)
match ending:
    case "destroys":
        dist.destroy_process_group()
    case "raises":
        raise RuntimeError("user error")
    case "terminates":
        os.kill(os.getpid(), signal.SIGTERM)
