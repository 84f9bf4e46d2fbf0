"""Fails in its first lives, at another point on each rank, and averages in its last."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import tailcut
from tests.training.common import RANK, report

life = os.environ["TORCHELASTIC_RESTART_COUNT"]
if life == "0" and RANK == 1:
    raise SystemExit(7)  # before the others can meet it
dist.init_process_group("tailcut", pg_options=tailcut.Config(deadline_s=60))
if life == "1" and RANK == 0:
    os.abort()
tensor = torch.full((1 << 16,), float(RANK))
dist.all_reduce(tensor, dist.ReduceOp.AVG)
report({"mean": float(tensor[0]), "life": life})
dist.destroy_process_group()
