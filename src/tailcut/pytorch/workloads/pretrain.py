"""Makes a checkpoint for the workload gpt-finetuned, by default from the text of Python's help().

python -m tailcut.pytorch.workloads.pretrain CHECKPOINT.pt [--text FILE] [--steps N]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from tailcut.pytorch.workloads import Workload, load


def pretrain(workload: Workload, steps: int) -> nn.Module:
    """A model that has learned for so many steps, in this process alone."""
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        workload.loss(model, workload.places(0, step, 0, 1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a GPT and write a checkpoint for gpt-finetuned.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, help="a text file (default: that of Python's help())")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    workload = load("gpt", options.text)
    model = pretrain(workload, options.steps)
    torch.save(model.state_dict(), options.checkpoint)
    print(f"{options.checkpoint}: validation loss {workload.evaluate(model, whole=True):.3f}")


if __name__ == "__main__":
    main()
