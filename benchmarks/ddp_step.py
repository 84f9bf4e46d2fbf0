"""A DDP step over tailcut and over plain Gloo, in the same processes, taking turns.

    torchrun --nproc-per-node 4 benchmarks/ddp_step.py

A step's time is that of its slowest rank, from a barrier to the end of the optimizer's step. A round gives
one ratio; every second round the sides change places. After every round the parameters of both sides must
agree within rounding, and tailcut's must be the same bits on all ranks.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tailcut

MODELS = {  # width and depth of a perceptron: its parameters times 4 are the bytes of a step
    "small (0.3 MB)": (128, 4),
    "medium (4 MB)": (512, 4),
    "large (67 MB)": (2048, 4),
}


def perceptron(width: int, depth: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return DistributedDataParallel(torch.nn.Sequential(*layers), gradient_as_bucket_view=True)


def step_of(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, width: int) -> Callable[[], None]:
    inputs = torch.randn(16, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    return step


def training(width: int, depth: int, over_tailcut: bool) -> tuple[torch.nn.Module, Callable[[], None]]:
    ddp = perceptron(width, depth)
    if over_tailcut:
        tailcut.attach(ddp)
    return ddp.module, step_of(ddp, torch.optim.SGD(ddp.parameters(), 0.01), width)


def slowest_s(step: Callable[[], None], steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()  # type: ignore[no-any-return]


def check(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    flat = torch.cat([p.detach().flatten() for p in ours.parameters()])
    reference = torch.cat([p.detach().flatten() for p in theirs.parameters()])
    root = flat.clone()
    dist.broadcast(root, 0)
    if not torch.equal(root, flat):
        raise SystemExit(f"rank {dist.get_rank()}: tailcut's replica differs from that of rank 0")
    if not torch.allclose(flat, reference, rtol=1e-3, atol=1e-6):
        raise SystemExit(f"tailcut and Gloo differ by {(flat - reference).abs().max():.1e}")


def measure(name: str, steps: int, rounds: int) -> None:
    width, depth = MODELS[name]
    ours, our_step = training(width, depth, over_tailcut=True)
    theirs, their_step = training(width, depth, over_tailcut=False)
    slowest_s(our_step, 5)
    slowest_s(their_step, 5)
    all_ours: list[float] = []
    all_theirs: list[float] = []
    ratios = []
    for index in range(rounds):
        if index % 2:
            their_times, our_times = slowest_s(their_step, steps), slowest_s(our_step, steps)
        else:
            our_times, their_times = slowest_s(our_step, steps), slowest_s(their_step, steps)
        check(ours, theirs)
        ratios.append(median(their_times) / median(our_times))
        all_ours += our_times
        all_theirs += their_times
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {name:<16} tailcut p50 {1e3 * median(all_ours):7.2f} ms   "
            f"Gloo p50 {1e3 * median(all_theirs):7.2f} ms   "
            f"ratio {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="timed steps per round (default: 40)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; each gives one ratio (default: 7)")
    arguments = parser.parse_args()
    warnings.simplefilter("error", RuntimeWarning)  # a clean loopback loses nothing
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in MODELS:
        measure(name, arguments.steps, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
