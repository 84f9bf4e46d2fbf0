"""One rank for every way in which a process may end, all in one group, in the middle of training."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import tailcut
from tailcut import Config
from tests.training.common import (
    INPUTS,
    OUTPUTS,
    RANK,
    join_group,
    loss_of,
    perceptron,
    say,
    tailcut_threads,
    udp_sockets,
)


def falls_off_the_end() -> None:
    return None


def destroys_its_process_group() -> None:
    dist.destroy_process_group()


def closes() -> None:
    attachment.close(linger_s=0.5)  # some of the others die without a word
    say({"sockets": udp_sockets(), "threads": tailcut_threads()})


def raises() -> None:
    raise ValueError("of the user")


def raises_in_a_block() -> None:
    with attachment:
        raise ValueError("of the user")


def exits() -> None:
    sys.exit(3)


def steps_alone() -> None:
    """Nobody else takes part in this one; a signal comes meanwhile."""
    say("waiting")
    loss_of(ddp, 0).backward()
    while True:  # the signal was late: it comes here
        signal.pause()


def forks() -> None:
    child = os.fork()
    if child == 0:
        attachment.close()  # is its parent's
        os._exit(0)  # as a worker of multiprocessing: Gloo itself survives no other exit of a forked child
    say({"child": os.waitpid(child, 0)[1]})
    loader = DataLoader(
        TensorDataset(torch.randn(16, INPUTS), torch.randn(16, OUTPUTS)),
        batch_size=4,
        num_workers=2,
        multiprocessing_context="fork",
    )
    say({"batches": sum(ddp.module(inputs).shape == (4, OUTPUTS) for inputs, _ in loader)})


WAYS: list[Callable[[], None]] = [
    falls_off_the_end,
    destroys_its_process_group,
    closes,
    raises,
    raises_in_a_block,
    exits,
    steps_alone,
    steps_alone,
    forks,
]

if __name__ == "__main__":
    join_group(f"file://{Path('rendezvous').absolute()}")
    ddp = DistributedDataParallel(perceptron())
    # Before tailcut's own, which come with attach: those run first.
    atexit.register(lambda: say({"threads_at_exit": tailcut_threads()}))
    attachment = tailcut.attach(ddp, Config(deadline_s=float(sys.argv[1])))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()
    say("trained")
    sys.stdin.readline()
    WAYS[RANK]()
