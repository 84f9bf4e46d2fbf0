"""Trains a small network with Ray Train and tailcut: attach in the loop of each worker, on one host or many.

    python examples/ray_train.py --workers 2

On a cluster, run it on the head node, or submit it with ``ray job submit``. docs/frameworks.md explains it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import tailcut
from tailcut.ray import Reporter


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(32, 64, generator=generator)
    return inputs, inputs[:, :1].sin()


def train(settings: dict[str, Any]) -> None:
    """One worker. Ray has made the process group, and it may start the loop again after a failure."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    attachment = tailcut.attach(model, deadline_s=settings["deadline_s"], optimizer=optimizer)
    reporter = Reporter(every_steps=10)
    rank = ray.train.get_context().get_world_rank()
    while attachment.step < settings["steps"]:
        inputs, targets = batch(attachment.step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        reporter.step(attachment.step, {"loss": loss.item()})
    # A report with a checkpoint waits for every worker, so it stands behind the steps, with a state that all
    # have in common.
    attachment.before_checkpoint()
    reporter.close()
    # Not stats().ops: Ray pickles this function, and would take the name for torch.ops, which it cannot.
    counts = attachment.state_dict()
    attachment.close()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if rank == 0:
            torch.save(model.state_dict(), os.path.join(directory, "model.pt"))
            checkpoint = Checkpoint.from_directory(directory)
        ray.train.report({"loss": loss.item(), "ops": counts["ops"]}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--deadline-s", type=float, default=5.0)
    parser.add_argument("--storage", default=os.path.expanduser("~/ray_results"))
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "deadline_s": options.deadline_s},
        scaling_config=ScalingConfig(num_workers=options.workers),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=options.storage),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
