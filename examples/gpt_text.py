"""A small character GPT under DDP with tailcut, on a text file, or on Python's own language reference.

torchrun --nproc-per-node 4 examples/gpt_text.py --text input.txt
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import tailcut  # 1 of 3


class GPT(nn.Module):
    def __init__(self, symbols, context, width=128, heads=4, depth=4):
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.place = nn.Parameter(0.02 * torch.randn(context, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)

    def forward(self, text):
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        return self.head(self.blocks(self.symbol(text) + self.place[:length], mask=mask, is_causal=True))


def read(path):
    if path:
        return path.read_text()
    from pydoc_data.topics import topics  # what help() shows, with every Python

    return "\n".join(topics.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="a text file (default: Python's language reference)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="passages per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters per passage")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    device = torch.device("cpu")
    if cuda := torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank = dist.get_rank()

    text = read(options.text)
    symbols = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([symbols[character] for character in text], device=device)
    training, validation = codes[: len(codes) * 9 // 10], codes[len(codes) * 9 // 10 :]
    torch.manual_seed(0)
    model = DistributedDataParallel(
        GPT(len(symbols), options.context).to(device), device_ids=[device.index] if cuda else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    attachment = tailcut.attach(model, optimizer=optimizer)  # 2 of 3

    def loss_of(network, codes, batch, random):
        first = torch.randint(len(codes) - options.context, (batch, 1), generator=random)
        passages = codes[(first + torch.arange(options.context + 1)).to(device)]
        return cross_entropy(network(passages[:, :-1]).flatten(0, 1), passages[:, 1:].flatten())

    random = torch.Generator().manual_seed(rank)  # every rank draws its own passages
    for step in range(1, options.steps + 1):
        loss = loss_of(model, training, options.batch, random)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step:>5}  loss {loss.item():.4f}", flush=True)

    if rank == 0:
        with torch.no_grad():
            print(f"validation loss {loss_of(model.module, validation, 64, random).item():.4f}")
        print(attachment.stats())  # 3 of 3
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
