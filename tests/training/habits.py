"""What attach does besides averaging: state, copies, resync, warnings, refusals, what it opens and closes."""

from __future__ import annotations

import copy
import gc
import io
import os
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tailcut import Attachment, Config, Stats
from tailcut.pytorch.reducer import Reduction
from tests.training.common import (
    INPUTS,
    OUTPUTS,
    PATIENT,
    RANK,
    Cases,
    heard_warnings,
    loss_of,
    native_threads,
    perceptron,
    refusal,
    replica_digest,
    tailcut_threads,
    udp_sockets,
)

case = Cases()


def steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()


def trained(count: int = 3) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Attachment]:
    ddp = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attachment = tailcut.attach(ddp, PATIENT, optimizer)
    steps(ddp, optimizer, count)
    return ddp, optimizer, attachment


@case
def counts_go_on_after_a_checkpoint() -> dict[str, Any]:
    _, _, before = trained(3)
    checkpoint = before.state_dict()
    before.close()
    _, _, after = trained(2)
    after.load_state_dict(checkpoint)
    again = after.state_dict()
    after.close()
    return {"saved": checkpoint["ops"], "ops": after.stats().ops, "saved_again": again["ops"]}


def _copy_trains_on(
    ddp: DistributedDataParallel, twin: DistributedDataParallel, attachment: Attachment
) -> dict[str, Any]:
    """The original and its copy do the same steps, each through a group of its own."""
    ((_, inner),) = twin._comm_hooks
    assert isinstance(inner, Attachment)
    twin_attachment = tailcut.attach(twin, PATIENT)
    for model in (ddp, twin):
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    ops = twin_attachment.stats().ops
    twin_attachment.close()
    attachment.close()
    return {
        "digests": [replica_digest(ddp), replica_digest(twin)],
        "ops": ops,
        "inner_enabled": inner.enabled,
        "inner_ops": inner.stats().ops,
        "inner_resync": refusal(inner.resync),
    }


@case
def saved_and_loaded() -> dict[str, Any]:
    ddp, _, attachment = trained()
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return _copy_trains_on(ddp, torch.load(file, weights_only=False), attachment)


@case
def deeply_copied() -> dict[str, Any]:
    ddp, _, attachment = trained()
    return _copy_trains_on(ddp, copy.deepcopy(ddp), attachment)


@case
def votes_on_steps() -> dict[str, Any]:
    """One plane costs more than the budget, sixteen nothing; the budget of rank 1 allows anything."""
    votes: list[bool] = []
    heard: list[Stats] = []
    for planes in (16, 1):
        ddp = DistributedDataParallel(perceptron())
        config = replace(PATIENT, codec="planes", planes=planes, budget=10.0 if RANK == 1 else 0.05)
        with tailcut.attach(ddp, config, on_over_budget=heard.append) as attachment:
            for step in range(130):
                loss_of(ddp, step).backward()
                if step % 10 == 0:
                    votes.append(attachment.should_step())
            scale = attachment.lr_scale
    return {"votes": votes, "heard": len(heard), "lr_scale": scale}


@case
def planes_are_told() -> dict[str, Any]:
    """Each rank chooses for itself; rank 0 says what and why."""
    ddp = DistributedDataParallel(perceptron())
    with tailcut.attach(ddp, replace(PATIENT, codec="planes")) as attachment:
        said = io.StringIO()
        with mock.patch.object(sys, "stderr", said):
            for step in range(60):
                loss_of(ddp, step).backward()
        planes = attachment.reports[-1].scatter.planes
    return {"said": said.getvalue(), "planes": planes, "key": str(attachment.reports[-1].key)}


def _norm_with_statistics() -> nn.Module:
    return nn.Sequential(perceptron(), nn.BatchNorm1d(OUTPUTS), nn.Linear(OUTPUTS, OUTPUTS))


def _disturbed_then_resynced(make: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(_norm_with_statistics(), broadcast_buffers=False)
    optimizer = make(ddp.parameters())
    attachment = tailcut.attach(ddp, PATIENT, optimizer)
    steps(ddp, optimizer, 3)
    if RANK == 1:
        with torch.no_grad():
            for tensor in [*ddp.parameters(), *ddp.buffers()]:
                tensor.add_(1)
            for state in optimizer.state.values():
                for value in state.values():
                    if torch.is_tensor(value):
                        value.add_(1)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 2
    digests = [replica_digest(ddp, optimizer)]
    attachment.resync()
    digests.append(replica_digest(ddp, optimizer))
    steps(ddp, optimizer, 3)
    digests.append(replica_digest(ddp.module[2], optimizer))  # statistics are each rank's own
    attachment.close()
    return {"digests": digests, "lr": float(optimizer.param_groups[0]["lr"])}


@case
def resync_with_momentum() -> dict[str, Any]:
    return _disturbed_then_resynced(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


@case
def resync_with_adam() -> dict[str, Any]:
    return _disturbed_then_resynced(lambda p: torch.optim.Adam(p, lr=0.01))


@case
def resync_with_a_tensor_as_learning_rate() -> dict[str, Any]:
    return _disturbed_then_resynced(lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False))


@case
def resync_of_a_rank_without_state() -> dict[str, Any]:
    """Rank 1 has just come back: a new optimizer, and an entry that the source does not have."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    attachment = tailcut.attach(ddp, PATIENT, optimizer)
    steps(ddp, optimizer, 2)
    if RANK == 1:
        optimizer.state.clear()
        optimizer.state[next(ddp.parameters())]["stray"] = torch.ones(3)
        with torch.no_grad():
            next(ddp.parameters()).add_(1)
    attachment.resync()
    digests = [replica_digest(ddp, optimizer)]
    steps(ddp, optimizer, 2)
    digests.append(replica_digest(ddp, optimizer))
    attachment.close()
    return {"digests": digests}


@case
def resync_from_another_rank_and_in_bfloat16() -> dict[str, Any]:
    ddp = DistributedDataParallel(perceptron().to(torch.bfloat16))
    attachment = tailcut.attach(ddp, PATIENT)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.fill_(RANK)
    attachment.resync(source=1)
    attachment.close()
    return {"values": sorted({value for p in ddp.parameters() for value in p.view(-1).tolist()})}


def _warnings_at_start(model: nn.Module, **options: Any) -> dict[str, Any]:
    with heard_warnings() as texts:
        tailcut.attach(DistributedDataParallel(model, **options), PATIENT).close()
    return {"warnings": texts}


@case
def warns_of_buffers() -> dict[str, Any]:
    return _warnings_at_start(_norm_with_statistics())


@case
def warns_of_unused_parameters() -> dict[str, Any]:
    return _warnings_at_start(perceptron(), find_unused_parameters=True)


@case
def warns_of_sync_batch_norm() -> dict[str, Any]:
    """DDP takes no such module on the CPU, so it comes in behind its back, and no step is done."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(_norm_with_statistics())
    ddp = DistributedDataParallel(perceptron())
    with heard_warnings() as texts:
        ddp.module.append(model[1])
        tailcut.attach(ddp, PATIENT).close()
    return {"warnings": texts, "on_cpu": refusal(lambda: DistributedDataParallel(model))}


@case
def warns_of_nothing() -> dict[str, Any]:
    quiet = [
        _warnings_at_start(_norm_with_statistics(), broadcast_buffers=False),
        _warnings_at_start(perceptron()),
        _warnings_at_start(perceptron(), find_unused_parameters=True, static_graph=True),
    ]
    return {"warnings": [text for result in quiet for text in result["warnings"]]}


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)


@case
def refusals() -> dict[str, Any]:
    before = [udp_sockets(), tailcut_threads()]
    refused = {
        "not-ddp": refusal(lambda: tailcut.attach(perceptron())),
        "float64": refusal(lambda: tailcut.attach(DistributedDataParallel(perceptron().double()))),
        "sparse": refusal(lambda: tailcut.attach(DistributedDataParallel(Sparse()))),
        "setting": refusal(lambda: tailcut.attach(DistributedDataParallel(perceptron()), deadline=5)),
    }
    return {"refused": refused, "left_open": [udp_sockets() - before[0], tailcut_threads() - before[1]]}


@case
def settings_beside_a_configuration() -> dict[str, Any]:
    ddp = DistributedDataParallel(perceptron())
    with tailcut.attach(ddp, replace(PATIENT, seed=3, planes=4), planes=8, straggler_share=0.5) as attachment:
        config = attachment.config
        assert config is not None
        return {"config": [config.seed, config.planes, config.straggler_share]}


@case
def reliable_parameters() -> dict[str, Any]:
    """In every step: what the runs of the bucket hold after it, and the gradients of the biases. DDP rebuilds
    its bucket after the first step."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with heard_warnings() as texts:
        attachment = tailcut.attach(ddp, PATIENT, reliable=("*.bias", "*.gone"))
    reducer = attachment._reducer
    assert reducer is not None
    found, biases = [], []
    with attachment, mock.patch.object(reducer.group, "allreduce", wraps=reducer.group.allreduce) as submit:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            array, runs = submit.call_args.args[0], submit.call_args.kwargs["reliable"]
            flat = torch.as_tensor(array)
            found.append(sorted(value for first, n in runs for value in flat[first : first + n].tolist()))
            gradients = [p.grad for name, p in ddp.module.named_parameters() if name.endswith("bias")]
            biases.append(sorted(value for g in gradients if g is not None for value in g.tolist()))
    return {"found": found, "biases": biases, "warnings": texts}


@case
def a_hook_is_there_already() -> dict[str, Any]:
    before = [udp_sockets(), native_threads()]
    ddp = DistributedDataParallel(perceptron())
    ddp.register_comm_hook(None, allreduce_hook)
    text = refusal(lambda: tailcut.attach(ddp, PATIENT))
    left_open = [udp_sockets() - before[0], native_threads(before[1]) - before[1]]
    steps(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 2)
    return {"refused": text, "left_open": left_open, "digest": replica_digest(ddp)}


@case
def configs_differ() -> dict[str, Any]:
    before = [udp_sockets(), native_threads()]
    text = refusal(lambda: tailcut.attach(DistributedDataParallel(perceptron()), Config(seed=RANK)))
    return {"refused": text, "left_open": [udp_sockets() - before[0], native_threads(before[1]) - before[1]]}


@case
def lengths_differ() -> dict[str, Any]:
    """DDP compares the shapes of its replicas itself; this is what tailcut says if that were not so."""
    ddp, optimizer, attachment = trained()
    reducer = attachment._reducer
    assert reducer is not None
    average = reducer.average

    def longer(tensor: torch.Tensor, key: str, **others: Any) -> Reduction:
        return average(torch.cat([tensor, tensor[: 7 * RANK]]), key, **others)

    with mock.patch.object(reducer, "average", longer):
        text = refusal(lambda: steps(ddp, optimizer, 1))
    optimizer.zero_grad()
    steps(ddp, optimizer, 2)
    attachment.close()
    return {"refused": text, "digest": replica_digest(ddp)}


@case
def after_close() -> dict[str, Any]:
    gc.collect()  # threads of earlier models end now, and not in between
    before = [udp_sockets(), native_threads()]
    ddp, optimizer, attachment = trained()
    opened = [udp_sockets() - before[0], native_threads() - before[1]]
    attachment.close()
    attachment.close()
    return {
        "opened": opened,
        "left_open": [udp_sockets() - before[0], native_threads(before[1]) - before[1]],
        "refused": refusal(lambda: steps(ddp, optimizer, 1)),
        "ops": attachment.stats().ops,
    }


@case
def dropped() -> dict[str, Any]:
    """The model goes out of use, and nobody has closed anything."""
    gc.collect()
    before = [udp_sockets(), native_threads()]
    ddp, optimizer, attachment = trained()
    dist.barrier()
    del ddp, optimizer, attachment
    gc.collect()
    return {"left_open": [udp_sockets() - before[0], native_threads(before[1]) - before[1]]}


@case
def with_a_block() -> dict[str, Any]:
    ddp = DistributedDataParallel(perceptron())
    before = udp_sockets()
    with tailcut.attach(ddp, PATIENT):
        inside = udp_sockets() - before
        steps(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 1)
    return {"sockets": [inside, udp_sockets() - before]}


@case
def the_second_rank_as_a_group_of_its_own_announces() -> dict[str, Any]:
    group = dist.new_group([1])
    if RANK == 1:
        ddp = DistributedDataParallel(nn.Linear(INPUTS, OUTPUTS), process_group=group)
        tailcut.attach(ddp, Config(seed=4711)).close()
    return {}


@case
def an_argument_wins() -> dict[str, Any]:
    """Over TAILCUT_DEADLINE_S, which the test sets."""
    from_environment = tailcut.attach(DistributedDataParallel(perceptron()))
    from_argument = tailcut.attach(DistributedDataParallel(perceptron()), Config(deadline_s=9.0))
    again = tailcut.attach(DistributedDataParallel(perceptron()), Config(deadline_s=9.0))
    attachments = (from_environment, from_argument, again)
    for attachment in attachments:
        attachment.close()
    return {"deadlines_s": [attachment.config.deadline_s for attachment in attachments if attachment.config]}


@case
def disabled() -> dict[str, Any]:
    before = [udp_sockets(), native_threads()]
    digests = []
    for attach in (False, True):
        ddp = DistributedDataParallel(perceptron())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with mock.patch.dict(os.environ, TAILCUT_DISABLE="1"):
            attachment = tailcut.attach(ddp, optimizer=optimizer) if attach else None
        steps(ddp, optimizer, 5)
        digests.append(replica_digest(ddp))
    assert attachment is not None
    attachment.resync()
    attachment.load_state_dict(attachment.state_dict())
    result = {
        "digests": digests,
        "opened": [udp_sockets() - before[0], native_threads() - before[1]],
        "enabled": attachment.enabled,
        "counted": attachment.stats().counts() != Stats().counts(),
        "reports": len(attachment.reports),
    }
    attachment.close()
    return result


@case
def disabled_by_nonsense() -> dict[str, Any]:
    with mock.patch.dict(os.environ, TAILCUT_DISABLE="maybe"):
        return {"refused": refusal(lambda: tailcut.attach(DistributedDataParallel(perceptron())))}


if __name__ == "__main__":
    case.run(sys.argv[1:])
