"""A rank that trains at the word of a test: one line in, one line out."""

from __future__ import annotations

import json
import linecache
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tailcut import Config
from tests.training.common import INPUTS, OUTPUTS, RANK, hear, join_group, loss_of, replica_digest, say


def main() -> None:
    join_group(f"file://{Path('rendezvous').absolute()}")
    torch.manual_seed(0)
    # One parameter, so one op a step. It has more granules than there are ranks: each owns a part of it.
    ddp = DistributedDataParallel(nn.Linear(INPUTS, OUTPUTS, bias=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    attachment = tailcut.attach(ddp, Config(**json.loads(sys.argv[1])))  # what is told later points here
    say("attached")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = 0
        while (word := hear()) == "step":
            try:
                optimizer.zero_grad()
                loss_of(ddp, step).backward()
            except Exception:
                say({"error": traceback.format_exc()})
                break
            optimizer.step()
            step += 1
            report = attachment.reports[-1]
            told = [w for w in caught if "tailcut" in str(w.message)]
            say(
                {
                    "step": step,
                    "status": report.status,
                    "lost_frac": report.lost_frac,
                    "missing_from": report.missing_from,
                    "digest": replica_digest(ddp),
                    "warnings": [str(w.message) for w in told],
                    "warned_at": [linecache.getline(w.filename, w.lineno).strip() for w in told],
                }
            )
    if word == "raise":
        raise RuntimeError(f"rank {RANK} has had enough")


if __name__ == "__main__":
    main()
