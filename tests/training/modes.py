"""The same training twice, once through plain Gloo and once through tailcut, in every mode that DDP has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tailcut import Attachment, Config
from tests.training.common import (
    INPUTS,
    OUTPUTS,
    PATIENT,
    RANK,
    RANKS,
    Cases,
    batch,
    loss_of,
    perceptron,
    refusal,
    replica_digest,
    values,
)

case = Cases()
STEPS = 6


@dataclass
class Training:
    """One of the two runs, and what it notes for the comparison."""

    ddp: DistributedDataParallel
    attachment: Attachment | None
    optimizer: torch.optim.Optimizer
    notes: list[Any] = field(default_factory=list)

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def train(training: Training) -> None:
    for step in range(STEPS):
        training.step(loss_of(training.ddp, step))


def begin(make: Callable[[], nn.Module], through_tailcut: bool, config: Config, **options: Any) -> Training:
    ddp = DistributedDataParallel(make(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    attachment = tailcut.attach(ddp, config, optimizer) if through_tailcut else None
    return Training(ddp, attachment, optimizer)


def compare(
    loop: Callable[[Training], None] = train,
    make: Callable[[], nn.Module] = perceptron,
    config: Config = PATIENT,
    **options: Any,
) -> dict[str, Any]:
    plain, ours = (begin(make, through_tailcut, config, **options) for through_tailcut in (False, True))
    for training in (plain, ours):
        loop(training)
    return comparison(plain, ours)


def comparison(plain: Training, ours: Training) -> dict[str, Any]:
    assert ours.attachment is not None
    stats = ours.attachment.stats()
    ours.attachment.close()
    return {
        "difference": (values(plain.ddp) - values(ours.ddp)).abs().max().item(),
        "norm": values(plain.ddp).abs().max().item(),
        "finite": bool(values(ours.ddp).isfinite().all()),
        "digest": replica_digest(ours.ddp),
        "notes": [plain.notes, ours.notes],
        "ops": stats.ops,
        "lost": stats.lost_coordinates + stats.partial_ops + stats.behind_ops,
    }


@case
def fifty_steps() -> dict[str, Any]:
    def fifty(training: Training) -> None:
        for step in range(50):
            training.step(loss_of(training.ddp, step))

    return compare(fifty, lambda: perceptron(200), bucket_cap_mb=0.05)


@case
def accumulation_without_sync() -> dict[str, Any]:
    def accumulate(training: Training) -> None:
        for step in range(STEPS):
            training.optimizer.zero_grad()
            with training.ddp.no_sync():
                loss_of(training.ddp, 3 * step).backward()
                loss_of(training.ddp, 3 * step + 1).backward()
            loss_of(training.ddp, 3 * step + 2).backward()
            training.optimizer.step()

    return compare(accumulate)


class Branches(nn.Module):
    """Every rank uses another branch in turn, and nobody the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(INPUTS, OUTPUTS) for _ in range(4))
        self.calls = RANK

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.branches[self.calls % 3](inputs)
        return result


@case
def unused_parameters() -> dict[str, Any]:
    def note_who_has_a_gradient(training: Training) -> None:
        for step in range(STEPS):
            training.step(loss_of(training.ddp, step))
            training.notes.append([p.grad is None for p in training.ddp.parameters()])

    return compare(note_who_has_a_gradient, Branches, find_unused_parameters=True, bucket_cap_mb=0.0005)


@case
def gradients_as_views_of_their_bucket() -> dict[str, Any]:
    return compare(gradient_as_bucket_view=True, bucket_cap_mb=0.01)


@case
def static_graph() -> dict[str, Any]:
    return compare(static_graph=True, bucket_cap_mb=0.01)


@case
def uneven_inputs_with_join() -> dict[str, Any]:
    def uneven(training: Training) -> None:
        with training.ddp.join():
            for step in range(3 + 2 * RANK):
                training.step(loss_of(training.ddp, step))

    return compare(uneven, bucket_cap_mb=0.01)


@case
def bfloat16() -> dict[str, Any]:
    return compare(make=lambda: perceptron().to(torch.bfloat16))


@case
def float16() -> dict[str, Any]:
    return compare(make=lambda: perceptron().to(torch.float16))


@case
def scaled_loss_with_inf_on_one_rank() -> dict[str, Any]:
    def scaled(training: Training) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(STEPS):
            training.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(training.ddp, step)
            if step == 2 and RANK == RANKS - 1:
                loss = loss * torch.inf
            before = values(training.ddp)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            skipped = bool((values(training.ddp) == before).all())
            training.notes.append([skipped, scaler.get_scale()])

    return compare(scaled, bucket_cap_mb=0.01)


@case
def clipped_gradients() -> dict[str, Any]:
    def clipped(training: Training) -> None:
        for step in range(STEPS):
            training.optimizer.zero_grad()
            loss_of(training.ddp, step).backward()
            nn.utils.clip_grad_norm_(training.ddp.parameters(), 0.1)
            training.optimizer.step()

    return compare(clipped)


@case
def compiled() -> dict[str, Any]:
    def run_compiled(training: Training) -> None:
        model = torch.compile(training.ddp, backend="aot_eager")
        for step in range(STEPS):
            inputs, targets = batch(step)
            training.step(nn.functional.mse_loss(model(inputs), targets))

    return compare(run_compiled)


@case
def python_reducer() -> dict[str, Any]:
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = DistributedDataParallel(perceptron())
    return {"refused": refusal(lambda: tailcut.attach(ddp))}


@case
def one_parameter_far_above_the_cap() -> dict[str, Any]:
    return compare(make=lambda: perceptron(300), bucket_cap_mb=0.0001)


@case
def a_cap_of_nothing() -> dict[str, Any]:
    return compare(bucket_cap_mb=0)


class Backwards(nn.Module):
    """Defined in the order opposite to that of use: DDP's first guess at its buckets is wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(40, OUTPUTS)
        self.middle = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.first = nn.Linear(INPUTS, 40)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).tanh()
        for layer in self.middle[::-1]:
            hidden = layer(hidden).tanh()
        result: torch.Tensor = self.last(hidden)
        return result


def note_ops_of_each_step(training: Training) -> None:
    for step in range(STEPS):
        before = training.attachment.stats().ops if training.attachment else 0
        training.step(loss_of(training.ddp, step))
        training.notes.append(training.attachment.stats().ops - before if training.attachment else 0)


@case
def rebuilt_buckets() -> dict[str, Any]:
    return compare(note_ops_of_each_step, Backwards, bucket_cap_mb=0.005)


@case
def rebuilt_buckets_on_two_lanes() -> dict[str, Any]:
    return compare(note_ops_of_each_step, Backwards, Config(deadline_s=60.0, lanes=2), bucket_cap_mb=0.005)


@case
def keys_of_buckets() -> dict[str, Any]:
    """What the hook calls each bucket, step by step."""
    ours = begin(Backwards, True, PATIENT, bucket_cap_mb=0.005)
    assert ours.attachment is not None
    reducer = ours.attachment._reducer
    assert reducer is not None
    keys: list[Any] = []
    average = reducer.average

    def noted(tensor: torch.Tensor, key: str, **rest: Any) -> Any:
        keys.append([key, tensor.numel()])
        return average(tensor, key, **rest)

    with mock.patch.object(reducer, "average", noted):
        for step in range(3):
            keys = []
            ours.step(loss_of(ours.ddp, step))
            ours.notes.append(keys)
    ours.attachment.close()
    return {"keys": ours.notes, "names": [name for name, _ in ours.ddp.module.named_parameters()]}


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(INPUTS, 40)
        self.narrow = nn.Linear(40, 40).to(torch.bfloat16)
        self.last = nn.Linear(40, OUTPUTS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.narrow(self.wide(inputs).to(torch.bfloat16))
        result: torch.Tensor = self.last(hidden.float().tanh())
        return result


@case
def two_dtypes() -> dict[str, Any]:
    return compare(note_ops_of_each_step, TwoDtypes, bucket_cap_mb=0.005)


def compare_pairs(loop: Callable[[Training, Training], None]) -> dict[str, Any]:
    pairs = [
        [begin(make, ours, PATIENT, bucket_cap_mb=0.005) for make in (perceptron, Backwards)]
        for ours in (False, True)
    ]
    for first, second in pairs:
        loop(first, second)
    one, other = (comparison(plain, ours) for plain, ours in zip(*pairs, strict=True))
    return (
        one
        | {"difference": max(one["difference"], other["difference"])}
        | {
            "digest": one["digest"] + other["digest"],
            "lost": one["lost"] + other["lost"],
        }
    )


@case
def two_models_in_turns() -> dict[str, Any]:
    def in_turns(first: Training, second: Training) -> None:
        for step in range(STEPS):
            first.step(loss_of(first.ddp, step))
            second.step(loss_of(second.ddp, step))

    return compare_pairs(in_turns)


@case
def two_models_interleaved() -> dict[str, Any]:
    """One backward pass through both, and two passes in the order opposite to that of the forward ones."""

    def interleaved(first: Training, second: Training) -> None:
        for step in range(STEPS):
            losses = [loss_of(first.ddp, step), loss_of(second.ddp, step)]
            for training in (first, second):
                training.optimizer.zero_grad()
            if step % 2:
                sum(losses, start=torch.zeros(())).backward()
            else:
                losses[1].backward()
                losses[0].backward()
            for training in (first, second):
                training.optimizer.step()

    return compare_pairs(interleaved)


@case
def the_last_ranks_as_a_group_of_their_own() -> dict[str, Any]:
    group = dist.new_group(list(range(1, RANKS)))
    if RANK == 0:
        return {}
    return compare(process_group=group)


@case
def every_rank_alone() -> dict[str, Any]:
    groups = [dist.new_group([rank]) for rank in range(RANKS)]
    return compare(process_group=groups[RANK])


if __name__ == "__main__":
    case.run(sys.argv[1:])
