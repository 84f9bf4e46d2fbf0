"""A rank that trains at the word of a test, with all that a state can have: AdamW, a scaler, buffers, and a
parameter that gets no gradient."""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tailcut.pytorch import following
from tests.training.common import (
    INPUTS,
    OUTPUTS,
    digest,
    hear,
    join_group,
    loss_of,
    replica_digest,
    say,
    values,
)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(INPUTS, 128), nn.BatchNorm1d(128), nn.Tanh(), nn.Linear(128, 128), nn.Linear(128, OUTPUTS)
    )
    layers[3].bias.requires_grad_(False)
    return layers


def main() -> None:
    join_group(f"file://{Path('rendezvous').absolute()}")
    warnings.simplefilter("ignore")  # of what stops a group: buffers, and a rank that is silent
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=20)
    settings = {"packet_bytes": 1400, **json.loads(sys.argv[1])}
    following.MANY_BYTES = settings.pop("many_bytes", following.MANY_BYTES)
    attachment = tailcut.attach(ddp, optimizer=optimizer, scaler=scaler, **settings)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, number)).backward()
        scaler.step(optimizer)
        scaler.update()

    def told() -> dict[str, Any]:
        stats = attachment.stats()
        state = torch.tensor([scaler.get_scale(), *scaler.state_dict().values()])
        return {
            "step": attachment.step,
            "digest": replica_digest(ddp, optimizer) + digest(state),
            "counts": [state["step"].item() for state in optimizer.state.values() if state],
            "scale": scaler.get_scale(),
            "some": values(ddp)[::200].tolist(),
            "rejoins": stats.rejoins,
            "rejoined_bytes": stats.rejoined_bytes,
            "contributing": stats.contributing,
            "ops": stats.ops,
        }

    say("attached")
    number = 0
    while word := hear():
        try:
            if word == "step":
                step(number)
                number += 1
            elif word == "resync":
                attachment.resync()
            say(told())
        except Exception:
            say({"error": traceback.format_exc()})
        if word == "end":
            break


if __name__ == "__main__":
    main()
