"""What comparing replicas costs a DDP step when they are equal: steps with and without it, taking turns.

torchrun --nproc-per-node 2 benchmarks/resync_cost.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tailcut

MODELS = {"small (0.3 MB)": 128, "medium (4 MB)": 512, "large (67 MB)": 2048}
"""Widths of a perceptron of four layers, by the bytes of its gradients."""


def training(width: int, drift_bound: float) -> tuple[tailcut.Attachment, Callable[[], None]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    attachment = tailcut.attach(ddp, optimizer=optimizer, drift_bound=drift_bound)
    inputs = torch.randn(16, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    return attachment, step


def times_s(step: Callable[[], None], steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def measure(name: str, steps: int, rounds: int) -> None:
    sides = [training(MODELS[name], bound) for bound in (0.0, 1e-3)]
    all_times: list[list[float]] = [[], []]
    for index in range(rounds):
        for side in (0, 1) if index % 2 else (1, 0):
            times = times_s(sides[side][1], steps)
            all_times[side] += times if index else []  # the first round warms up
    without, comparing = (1e3 * median(times) for times in all_times)
    stats = sides[1][0].stats()
    share = stats.state_bytes / (4 * stats.coordinates)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {name:<16} without {without:7.2f} ms   "
            f"comparing {comparing:7.2f} ms   {comparing / without - 1:+.1%}   {share:.2%} of the bytes",
            flush=True,
        )
    for attachment, _ in sides:
        attachment.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="timed steps per round (default: 40)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in MODELS:
        measure(name, arguments.steps, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
