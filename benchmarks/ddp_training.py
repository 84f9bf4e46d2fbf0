"""One rank of ddp_testbed.py: a CNN under DDP whose gradients are averaged in the way that the order says.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=... python benchmarks/ddp_training.py ORDER.json

Writes RANK.json beside the order. It knows nothing of testbeds or of other sides.
"""
# No postponed annotations: DDP compares its hook's annotations with the classes themselves.

import dataclasses
import gzip
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import tailcut

WARMUP_STEPS = 10
"""These steps are not timed. They cover the rebuild of DDP's buckets and the first steps of PowerSGD."""
STOP_AHEAD_STEPS = 5
"""Rank 0 announces the last step this many steps ahead, so that all ranks know when they get there."""
STORE_LIMIT = timedelta(hours=1)
POWERSGD_RANK = 4
ONE_BUCKET_MB = 1000
"""PowerSGD's collectives follow each other in callbacks, so with several buckets their order would differ by
rank."""
EVALUATED_IMAGES = 500
EVALUATION_BATCH = 50
"""Larger batches take longer per image, because their activations leave the caches."""
LEARNING_RATE, MOMENTUM = 0.05, 0.9


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of 28 x 28 pixels, 0 to 255, and their classes."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def __getitem__(self, places: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pixels[places].float().div(127.5).sub(1.0).unsqueeze(1), self.labels[places]


def read_images(directory: str | None) -> tuple[Images, Images]:
    """Images for training and for testing."""
    if directory is None:
        return read_digits()
    return read_idx(Path(directory), "train"), read_idx(Path(directory), "t10k")


def read_idx(directory: Path, part: str) -> Images:
    """Reads MNIST's files: images follow a header of 16 bytes, labels one of 8."""
    pixels = gzip.decompress((directory / f"{part}-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((directory / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    return Images(
        torch.tensor(np.frombuffer(pixels, np.uint8, offset=16)).reshape(-1, 28, 28),
        torch.tensor(np.frombuffer(labels, np.uint8, offset=8)).long(),
    )


def read_digits() -> tuple[Images, Images]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    small = torch.tensor(pixels[order], dtype=torch.float32).reshape(-1, 1, 8, 8) * (255 / 16)
    large = nn.functional.interpolate(small, (28, 28), mode="bilinear").squeeze(1)
    classes = torch.tensor(labels[order])
    return Images(large[:1437], classes[:1437]), Images(large[1437:], classes[1437:])


def cnn() -> nn.Module:
    """A CNN of 1.59 million parameters: 6.4 MB of gradients."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


def bf16_hook(process_group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replaces torch's own hook, which DDP recognizes by its name and accepts only with CUDA; Gloo can do it
    too."""
    return default_hooks.bf16_compress_hook(process_group, bucket)


HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": bf16_hook}


def distributed(
    kind: str, config: dict[str, Any]
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any]:
    """The model of a side, its optimizer, and tailcut's attachment if it has one."""
    one_bucket = {"bucket_cap_mb": ONE_BUCKET_MB} if kind == "powersgd" else {}
    ddp = DistributedDataParallel(cnn(), **one_bucket)
    optimizer = torch.optim.SGD(ddp.parameters(), LEARNING_RATE, MOMENTUM)
    attachment = None
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif kind == "tailcut":
        attachment = tailcut.attach(ddp, tailcut.Config(**config), optimizer)
    elif kind in HOOKS:
        ddp.register_comm_hook(None, HOOKS[kind])
    return ddp, optimizer, attachment


class LastStep:
    """The last step, which rank 0 decides. The others hear of it in a thread of their own, so no step waits
    for it."""

    def __init__(self, rank: int, store: TCPStore, number: int | None) -> None:
        self.number = number
        self._store = store
        if rank != 0 and number is None:
            threading.Thread(target=self._listen, daemon=True).start()

    def decide(self, number: int) -> None:
        self.number = number
        self._store.set("last step", str(number))

    def _listen(self) -> None:
        # It has a connection of its own, because one that waits for a key does nothing else.
        own = TCPStore(self._store.host, self._store.port, timeout=STORE_LIMIT)
        self.number = int(own.get("last step"))


@torch.inference_mode()
def accuracy(model: nn.Module, images: Images) -> float:
    right = 0
    for start in range(0, len(images.labels), EVALUATION_BATCH):
        pixels, labels = images[slice(start, start + EVALUATION_BATCH)]
        right += int((model(pixels).argmax(1) == labels).sum())
    return right / len(images.labels)


def fingerprint(model: nn.Module) -> str:
    parameters = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(parameters).hexdigest()


def train(order: dict[str, Any], store: TCPStore, begun: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    training, test = read_images(order["data"])
    sample = Images(test.pixels[:EVALUATED_IMAGES], test.labels[:EVALUATED_IMAGES])
    torch.manual_seed(order["seed"])
    ddp, optimizer, attachment = distributed(order["kind"], order["config"])
    chance = torch.Generator().manual_seed(1000 * order["seed"] + rank)

    def step() -> None:
        pixels, labels = training[torch.randint(len(training.labels), (order["batch"],), generator=chance)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(pixels), labels).backward()
        optimizer.step()

    for _ in range(WARMUP_STEPS):
        step()
    last = LastStep(rank, store, order["steps"])
    if order["steps"]:
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, order["steps"])
    dist.barrier()
    if rank == 0:
        begun.touch()
    times_s: list[float] = []
    evaluations: list[tuple[int, float, float]] = []
    start_s = time.perf_counter()
    for number in itertools.count(1):
        before_s = time.perf_counter()
        step()
        after_s = time.perf_counter()
        times_s.append(after_s - before_s)
        if order["steps"]:
            schedule.step()
        if rank == 0:
            if number % order["eval_every"] == 0:
                evaluations.append((number, after_s - start_s, accuracy(ddp.module, sample)))
            elapsed_s = time.perf_counter() - start_s
            if last.number is None and elapsed_s * (1 + STOP_AHEAD_STEPS / number) >= order["seconds"]:
                last.decide(number + STOP_AHEAD_STEPS)
        if last.number is not None and number >= last.number:
            break
    elapsed_s = time.perf_counter() - start_s
    # A rank that ran ahead of rank 0 may have heard too late.
    result: dict[str, Any] = {"times_s": times_s[: last.number], "elapsed_s": elapsed_s}
    if attachment:
        stats = attachment.stats()
        result |= {"stats": stats.to_dict(), "stats_text": str(stats)}
        attachment.before_checkpoint()
        attachment.close()
    result["parameters"] = fingerprint(ddp.module)
    if rank == 0:
        if not evaluations or evaluations[-1][0] != number:
            evaluations.append((number, elapsed_s, accuracy(ddp.module, sample)))
        result |= {"evaluations": evaluations, "accuracy": accuracy(ddp.module, test)}
    return result


def main(order_file: Path) -> None:
    torch.set_num_threads(1)
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*place, ranks, is_master=rank == 0, timeout=STORE_LIMIT)
    dist.init_process_group("gloo", store=PrefixStore("ddp", store), rank=rank, world_size=ranks)
    directory = order_file.parent
    result = train(json.loads(order_file.read_text()), store, directory / "begun")
    part = directory / f"{rank}.part"
    part.write_text(json.dumps(result))
    part.rename(directory / f"{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
