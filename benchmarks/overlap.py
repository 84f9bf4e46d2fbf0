"""How much of the communication hides behind backward? Eight buckets, each about 15 ms on the wire.

    torchrun --nproc-per-node 2 benchmarks/overlap.py

Backward is a chain of eight layers that sleep, as a host does while an accelerator computes. Packets are as
large as on Ethernet, without offload. So the benchmark measures whether buckets travel meanwhile, not whether
two cores can do the work of four. Three variants take turns in the same processes: backward alone, over
tailcut, and with a hook that waits for each bucket. The cost is the time that backward grows by, as a share
of the time that the eight buckets take by themselves. An eighth cannot be hidden, because nothing runs after
the last bucket.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tailcut

LAYERS = 8
SIDES = ("alone", "tailcut", "waiting in the hook")
CONFIG = tailcut.Config(packet_bytes=1280, offload=False)


class Slow(torch.autograd.Function):
    """Passes its input on. Its backward takes time but no processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.layer.backward_s)
        return gradients[0], ctx.layer.gradient, None


class Layer(torch.nn.Module):
    """One parameter that fills one bucket, with a gradient that was computed beforehand."""

    def __init__(self, bucket_bytes: int, backward_s: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(bucket_bytes // 4))
        self.gradient = torch.full_like(self.weight, 1e-3)
        self.backward_s = backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(x, self.weight, self)  # type: ignore[no-untyped-call, no-any-return]


def backward_of(side: str, bucket_bytes: int, backward_s: float) -> Callable[[], None]:
    model = torch.nn.Sequential(*(Layer(bucket_bytes, backward_s) for _ in range(LAYERS)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20 / 2, gradient_as_bucket_view=True)
    if side == "tailcut":
        tailcut.attach(ddp, CONFIG)
    elif side == "waiting in the hook":
        group = tailcut.Group(dist.get_rank(), dist.get_world_size(), _store(), CONFIG, name="hook")

        def wait(_, bucket):  # type: ignore[no-untyped-def]
            group.allreduce(bucket.buffer().numpy()).wait()
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, wait)

    def backward() -> None:
        if side == "alone":
            with ddp.no_sync():
                ddp(torch.ones(1, requires_grad=True)).sum().backward()
        else:
            ddp(torch.ones(1, requires_grad=True)).sum().backward()

    return backward


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def slowest_s(work: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bucket-ms", type=float, default=15.0, help="time of one bucket (default: 15)")
    parser.add_argument("--backward-ms", type=float, default=15.0, help="backward of a layer (default: 15)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: 15)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tailcut.Group(dist.get_rank(), dist.get_world_size(), _store(), CONFIG, name="sizing") as group:

        def one_bucket_s(bucket_bytes: int) -> float:
            bucket = torch.zeros(bucket_bytes // 4).numpy()
            return median(slowest_s(lambda: group.allreduce(bucket).wait()) for _ in range(9))  # type: ignore[func-returns-value]

        bucket_bytes = 4 << 20
        bucket_bytes = (
            int(bucket_bytes * arguments.bucket_ms / 1e3 / one_bucket_s(bucket_bytes)) // 4096 * 4096
        )
        communication_s = LAYERS * one_bucket_s(bucket_bytes)
    backwards = {side: backward_of(side, bucket_bytes, arguments.backward_ms / 1e3) for side in SIDES}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for index in range(arguments.rounds + 3):
        for side, backward in backwards.items():
            elapsed_s = slowest_s(backward)
            if index >= 3:  # DDP rebuilds its buckets after the first step
                times[side].append(elapsed_s)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks, {LAYERS} buckets of {bucket_bytes / 2**20:.1f} MiB, "
            f"{1e3 * communication_s:.0f} ms in all by themselves"
        )
        for side in SIDES:
            growth = [(t - a) / communication_s for t, a in zip(times[side], times["alone"], strict=True)]
            print(
                f"  {side:<20} backward {1e3 * median(times[side]):6.1f} ms   grows by "
                f"{median(growth):4.0%} ({min(growth):.0%} to {max(growth):.0%}) of the communication"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
