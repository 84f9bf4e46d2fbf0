"""All that torch.distributed does with a process group, over the backend "tailcut", results checked."""

from __future__ import annotations

import linecache
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tailcut.pytorch import stats_of
from tailcut.pytorch.creation import bounded_part
from tests.training.common import INPUTS, RANK, RANKS, Cases, perceptron, refusal, values

case = Cases("tailcut")
MEAN = (RANKS - 1) / 2
LARGE = 1 << 16
Collective = Callable[[int], bool]


def filled(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), RANK, dtype=dtype)


def reduced(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> torch.Tensor:
    dist.all_reduce(tensor, op, **options)
    return tensor


def average_large(i: int) -> bool:
    return bool((reduced(filled(LARGE + i), dist.ReduceOp.AVG) == MEAN).all())


def average_half(i: int) -> bool:
    return bool((reduced(filled(LARGE + i, torch.bfloat16), dist.ReduceOp.AVG) == MEAN).all())


def average_several_in_flight(i: int) -> bool:
    tensors = [filled(LARGE + 64 * k + i) for k in range(4)]
    works = [dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True) for tensor in tensors]
    return all(work.wait() for work in works) and all(bool((tensor == MEAN).all()) for tensor in tensors)


def average_small(i: int) -> bool:
    return bool((reduced(filled(3), dist.ReduceOp.AVG) == MEAN).all())


def sum_large(i: int) -> bool:
    return bool((reduced(filled(LARGE)) == RANKS * MEAN).all())


def sum_integers(i: int) -> bool:
    return bool((reduced(filled(LARGE, torch.int64)) == RANKS * MEAN).all())


def largest(i: int) -> bool:
    return reduced(filled(5), dist.ReduceOp.MAX)[0] == RANKS - 1  # type: ignore[return-value]


def broadcast(i: int) -> bool:
    tensor = filled(7)
    dist.broadcast(tensor, src=i % RANKS)
    return bool((tensor == i % RANKS).all())


def all_gather(i: int) -> bool:
    outputs = [torch.empty(3) for _ in range(RANKS)]
    dist.all_gather(outputs, filled(3))
    return [int(output[0]) for output in outputs] == list(range(RANKS))


def all_gather_flat(i: int) -> bool:
    output = torch.empty(3 * RANKS)
    dist.all_gather_single(output, filled(3))
    return output[::3].tolist() == list(range(RANKS))


def gather(i: int) -> bool:
    outputs = [torch.empty(3) for _ in range(RANKS)] if RANK == 0 else None
    dist.gather(filled(3), outputs, dst=0)
    return outputs is None or [int(output[0]) for output in outputs] == list(range(RANKS))


def scatter(i: int) -> bool:
    output = torch.empty(2)
    dist.scatter(output, [torch.full((2,), float(k)) for k in range(RANKS)] if RANK == 0 else None, src=0)
    return output[0] == RANK  # type: ignore[return-value]


def reduce(i: int) -> bool:
    tensor = filled(4)
    dist.reduce(tensor, dst=0)
    return RANK != 0 or bool(tensor[0] == RANKS * MEAN)


def reduce_scatter(i: int) -> bool:
    output = torch.empty(2)
    dist.reduce_scatter_single(output, torch.ones(2 * RANKS))
    return output[0] == RANKS  # type: ignore[return-value]


def all_to_all(i: int) -> bool:
    output = torch.empty(RANKS)
    dist.all_to_all_single(output, filled(RANKS))
    return output.tolist() == list(range(RANKS))


def objects(i: int) -> bool:
    outputs: list[Any] = [None] * RANKS
    dist.all_gather_object(outputs, {"rank": RANK})
    return outputs == [{"rank": rank} for rank in range(RANKS)]


def neighbours(i: int) -> bool:
    received = torch.empty(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, filled(3), (RANK + 1) % RANKS),
            dist.P2POp(dist.irecv, received, (RANK - 1) % RANKS),
        ]
    )
    for work in works:
        work.wait()
    return received[0] == (RANK - 1) % RANKS  # type: ignore[return-value]


def barrier(i: int) -> bool:
    dist.barrier()
    return True


def functional_average(i: int) -> bool:
    return bool((functional.all_reduce(filled(LARGE), "avg", dist.group.WORLD) == MEAN).all())


BOUNDED: dict[Collective, int] = {
    average_large: 1,
    average_half: 1,
    average_several_in_flight: 4,
    functional_average: 1,
}
"""How many ops each puts through tailcut; all the others put none."""
COLLECTIVES: list[Collective] = [
    *BOUNDED,
    *(
        average_small,
        sum_large,
        sum_integers,
        largest,
        broadcast,
        all_gather,
        all_gather_flat,
        gather,
        scatter,
    ),
    *(reduce, reduce_scatter, all_to_all, objects, neighbours, barrier),
]


@case
def mixed() -> dict[str, Any]:
    """Three thousand collectives in a random order, the same on all ranks."""
    choice = random.Random(17)
    before = stats_of().ops
    wrong: list[str] = []
    bounded = 0
    for i in range(3000):
        collective = choice.choice(COLLECTIVES)
        bounded += BOUNDED.get(collective, 0)
        if not collective(i):
            wrong.append(f"{collective.__name__}({i})")
    stats = stats_of()
    return {"wrong": wrong, "bounded": bounded, "ops": stats.ops - before, "lost": stats.lost_coordinates}


@case
def subgroups() -> dict[str, Any]:
    """With a configuration of their own, and as a dimension of a mesh."""
    config = tailcut.Config(deadline_s=60, bound_from_bytes=0)
    pairs = [
        dist.new_group([first, first + 1], backend="tailcut", pg_options=config)
        for first in range(0, RANKS, 2)
    ]
    pair = pairs[RANK // 2]
    small = reduced(filled(3), dist.ReduceOp.AVG, group=pair)
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("outer", "inner"))
    outer = reduced(filled(LARGE), dist.ReduceOp.AVG, group=mesh.get_group("outer"))
    return {
        "small": small.tolist(),
        "small_ops": stats_of(pair).ops,
        "outer": float(outer[0]),
        "backend": dist.get_backend(mesh.get_group("outer")),
        "outer_ops": stats_of(mesh.get_group("outer")).ops,
        "options_refused": refusal(lambda: dist.new_group(backend="tailcut", pg_options="fast")),
    }


@case
def uneven() -> dict[str, Any]:
    """Ranks 0 and 1 are in one more group than the others when all make a mesh."""
    dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("outer", "inner"))
    means = [
        reduced(filled(LARGE), dist.ReduceOp.AVG, group=mesh.get_group(name)) for name in ("outer", "inner")
    ]
    return {"means": [float(mean[0]) for mean in means]}


@case
def hybrid_sharding() -> dict[str, Any]:
    """HSDP: sharded over Gloo inside a pair, averaged over tailcut between the replicas."""

    def train(override: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        mesh = init_device_mesh(
            "cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"), backend_override=override
        )
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(RANK)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
        flat = [p.full_tensor().detach().flatten() for p in model.parameters()]  # type: ignore[attr-defined]
        return torch.cat(flat), mesh.get_group("replicate")

    plain, _ = train({"replicate": "gloo", "shard": "gloo"})
    ours, group = train({"replicate": "tailcut", "shard": "gloo"})
    return {"difference": float((plain - ours).abs().max()), "ops": stats_of(group).ops}


@case
def ddp() -> dict[str, Any]:
    """DDP takes sums: exact over Gloo, bounded only in a group that opts in."""

    def train(**options: Any) -> tuple[torch.Tensor, int]:
        group = dist.new_group(**options)
        model = DistributedDataParallel(perceptron(256), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(RANK)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, INPUTS)).square().mean().backward()
            optimizer.step()
        return values(model), stats_of(group).ops if options["backend"] == "tailcut" else 0

    plain, _ = train(backend="gloo")
    exact, exact_ops = train(backend="tailcut")
    bounded, bounded_ops = train(backend="tailcut", pg_options=tailcut.Config(deadline_s=60, bound_sums=True))
    return {
        "exact": torch.equal(plain, exact),
        "exact_ops": exact_ops,
        "difference": float((plain - bounded).abs().max()),
        "bounded_ops": bounded_ops,
    }


@case
def alarms() -> dict[str, Any]:
    """The thread that ends ops has something to tell of two groups: one that was asked for, one of a mesh."""
    asked_for = dist.new_group()  # told of the group
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("one", "all"))  # told of the mesh
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for group in (asked_for, mesh.get_group("one")):
            bounded_part(group).group._steering._row._alarms.append("tailcut: a rank is dropped")
            reduced(filled(LARGE), dist.ReduceOp.AVG, group=group)
    places = [(Path(w.filename).name, linecache.getline(w.filename, w.lineno)) for w in caught]
    return {"places": [f"{name}: {line.partition('#')[2].strip()}" for name, line in places]}


@case
def mismatch() -> dict[str, Any]:
    """Rank 0 averages another length than the others: it is told, and the group goes on."""
    told = refusal(lambda: reduced(filled(LARGE + 1000 * (RANK == 0)), dist.ReduceOp.AVG))
    return {"told": told, "afterwards": average_large(0)}


@case
def again() -> dict[str, Any]:
    """Other lives in the same process: same store, same names, but not the same members."""
    averages = []
    for pair in ([0, 1], [1, 2]):
        dist.destroy_process_group()
        dist.init_process_group("tailcut")
        group = dist.new_group(pair)
        if RANK in pair:
            averages.append(
                bool((reduced(filled(LARGE), dist.ReduceOp.AVG, group=group) == sum(pair) / 2).all())
            )
            model = DistributedDataParallel(perceptron(), process_group=group)
            with tailcut.attach(model) as attachment:
                model(torch.randn(8, INPUTS)).square().mean().backward()
                averages.append(attachment.stats().ops > 0)
        averages.append(average_large(0))
    return {"averages": averages, "ops": stats_of().ops}


if __name__ == "__main__":
    case.run(sys.argv[1:])
