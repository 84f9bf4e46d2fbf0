"""What frameworks hand to tailcut: models in wrappers, several optimizers, means of integers, sums alone."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tailcut.pytorch import stats_of
from tailcut.pytorch.bounded import TELLING_SUMS
from tests.training.common import PATIENT, RANK, Cases, heard_warnings, loss_of, perceptron, refusal, values

case = Cases()
STEPS = 4


class Fabricated(nn.Module):
    """Keeps a model as Fabric does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._forward_module(inputs)
        return result


class Held:
    """Keeps an optimizer as Lightning does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.Adam(parameters[:3], 0.01), torch.optim.SGD(parameters[3:], 0.1, momentum=0.9)]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], begin: int = 0) -> None:
    for step in range(begin, begin + STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()


def _trained_in(wrap: Any) -> dict[str, Any]:
    plain = DistributedDataParallel(perceptron())
    ours = wrap(DistributedDataParallel(perceptron()))
    optimizers = two_optimizers(ours)
    held: list[Any] = [Held(optimizer) for optimizer in optimizers]
    attachment = tailcut.attach(ours, PATIENT, held)
    train(plain, two_optimizers(plain))
    train(ours, optimizers)
    ops = attachment.stats().ops
    even = attachment._catch_up._pace.even  # as a user it shows only when the rank falls behind
    attachment.close()
    return {"difference": float((values(plain) - values(ours)).abs().max()), "ops": ops, "even": even}


@case
def compiled_first() -> dict[str, Any]:
    return _trained_in(lambda ddp: torch.compile(ddp, backend="eager"))


@case
def in_fabric() -> dict[str, Any]:
    return _trained_in(lambda ddp: Fabricated(torch.compile(ddp, backend="eager")))


@case
def resync_of_several_optimizers() -> dict[str, Any]:
    ddp = DistributedDataParallel(perceptron())
    optimizers = two_optimizers(ddp)
    with tailcut.attach(ddp, PATIENT, optimizers) as attachment:
        train(ddp, optimizers)
        if RANK == 1:
            for optimizer in optimizers:
                for state in optimizer.state.values():
                    for name in ("exp_avg", "momentum_buffer"):
                        if name in state:
                            state[name].fill_(7)
                optimizer.param_groups[0]["lr"] = 3.0
        attachment.resync()
    moments = [s["exp_avg"].sum() for s in optimizers[0].state.values()]
    moments += [s["momentum_buffer"].sum() for s in optimizers[1].state.values()]
    return {"lr": [o.param_groups[0]["lr"] for o in optimizers], "moments": [float(m) for m in moments]}


@case
def refusals() -> dict[str, Any]:
    ddp = DistributedDataParallel(perceptron())
    twice = [torch.optim.SGD(ddp.parameters(), 0.1) for _ in range(2)]
    return {
        "twice": refusal(lambda: tailcut.attach(ddp, PATIENT, twice)),
        "none": refusal(lambda: tailcut.attach(ddp, PATIENT, [])),
        "other": refusal(lambda: tailcut.attach(ddp, PATIENT, 7)),
    }


@case
def means_of_integers() -> dict[str, Any]:
    group = dist.new_group(backend="tailcut")
    found = []
    for dtype in (torch.int64, torch.int32, torch.uint8):
        tensor = torch.tensor([3 * RANK + 1, 4, 100 * RANK], dtype=dtype)
        work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=True)
        work.wait()
        found.append(tensor.tolist())
    signed = torch.tensor([-1 - 2 * RANK, -3 * RANK])
    dist.all_reduce(signed, dist.ReduceOp.AVG, group=group)
    return {"found": found, "signed": signed.tolist(), "ops": stats_of(group).ops}


def _warnings_of(op: dist.ReduceOp.RedOpType, bounded_first: bool) -> list[str]:
    group = dist.new_group(backend="tailcut")
    with heard_warnings() as heard:
        if bounded_first:
            dist.all_reduce(torch.ones(1 << 16), dist.ReduceOp.AVG, group=group)
        for _ in range(2 * TELLING_SUMS):
            dist.all_reduce(torch.ones(1 << 16), op, group=group)
    return heard


@case
def only_sums() -> dict[str, Any]:
    return {
        "sums": _warnings_of(dist.ReduceOp.SUM, bounded_first=False),
        "after_a_mean": _warnings_of(dist.ReduceOp.SUM, bounded_first=True),
        "largest": _warnings_of(dist.ReduceOp.MAX, bounded_first=False),
    }


if __name__ == "__main__":
    case.run(sys.argv[1:])
