"""What comparing replicas costs a DDP step when they are equal: steps with and without it, taking turns.

torchrun --nproc-per-node 2 benchmarks/resync_cost.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from ddp_step import MODELS, perceptron, slowest_s, step_of

import tailcut


def training(width: int, depth: int, drift_bound: float) -> tuple[tailcut.Attachment, Callable[[], None]]:
    ddp = perceptron(width, depth)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    attachment = tailcut.attach(ddp, optimizer=optimizer, drift_bound=drift_bound)
    return attachment, step_of(ddp, optimizer, width)


def measure(name: str, steps: int, rounds: int) -> None:
    sides = [training(*MODELS[name], bound) for bound in (0.0, tailcut.Config().drift_bound)]
    medians: list[tuple[float, float]] = []
    for index in range(rounds + 1):
        order = (0, 1) if index % 2 else (1, 0)
        times_s = {side: slowest_s(sides[side][1], steps) for side in order}
        medians += [(median(times_s[0]), median(times_s[1]))] if index else []  # the first round warms up
    without, comparing = (1e3 * median(times) for times in zip(*medians, strict=True))
    more = [with_it / alone - 1 for alone, with_it in medians]
    stats = sides[1][0].stats()
    share = stats.state_bytes / (4 * stats.coordinates)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {name:<16} without {without:7.2f} ms   "
            f"comparing {comparing:7.2f} ms   "
            f"{median(more):+.1%} ({min(more):+.1%} to {max(more):+.1%})   {share:.2%} of the bytes",
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
