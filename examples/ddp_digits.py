"""An image classifier under DDP with tailcut: scikit-learn's digits, or Fashion-MNIST given with --data.

torchrun --nproc-per-node 4 examples/ddp_digits.py
"""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tailcut  # 1 of 3


def read_digits():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = torch.tensor(pixels[order] / 16, dtype=torch.float32)
    labels = torch.tensor(labels[order])
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def read_idx(directory):
    """The four files of MNIST or Fashion-MNIST; images follow a header of 16 bytes, labels one of 8."""
    for part in ("train", "t10k"):
        pixels = gzip.decompress((directory / f"{part}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((directory / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        yield torch.tensor(np.frombuffer(pixels, np.uint8, offset=16)).reshape(-1, 28 * 28) / 255
        yield torch.tensor(np.frombuffer(labels, np.uint8, offset=8)).long()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="directory with the four .gz files of Fashion-MNIST")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    device = torch.device("cpu")
    if cuda := torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank = dist.get_rank()

    data = read_idx(options.data) if options.data else read_digits()
    images, labels, test_images, test_labels = (tensor.to(device) for tensor in data)
    torch.manual_seed(0)
    layers = nn.Linear(images.shape[1], 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(device), device_ids=[device.index] if cuda else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    attachment = tailcut.attach(model, optimizer=optimizer)  # 2 of 3

    random = torch.Generator().manual_seed(rank)  # every rank draws its own batches
    for step in range(1, options.steps + 1):
        chosen = torch.randint(len(images), (options.batch,), generator=random).to(device)
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step:>5}  loss {loss.item():.4f}", flush=True)

    if rank == 0:
        with torch.no_grad():
            right = model.module(test_images).argmax(1) == test_labels
        print(f"test accuracy {right.float().mean().item():.2%}")
        print(attachment.stats())  # 3 of 3
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
