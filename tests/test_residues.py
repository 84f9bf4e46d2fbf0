"""What coding takes enters the next op of its bucket (docs/late.md): two planes lose nothing either."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tailcut import Config, Scenario, Simulation, simulate
from tailcut.engine.residues import UNUSED_OPS, Residues, carries_coding
from tailcut.epsilon import predicted
from tailcut.grid import GridLayout
from tailcut.pytorch.demands import fitting
from tests.groups import allreduce, open_groups
from tests.measures import nmse

LIVE, ZEROS = 40, 24


def run(residue: str, **more: Any) -> Simulation:
    """Ops with values, then some with zeros, in which what is carried comes."""
    values: dict[str, Any] = {
        "ranks": 4,
        "length": 5000,
        "ops": LIVE + ZEROS,
        "buckets": 1,
        "deadline_s": 1.0,
    }
    scenario = Scenario(**{**values, "codec": "planes", "planes": 2, "residue": residue, **more})
    random = np.random.default_rng(scenario.seed)
    same = random.standard_normal((scenario.ops, scenario.length), np.float32)
    same[LIVE:] = 0
    return simulate(scenario, [[op.copy() for _ in range(scenario.ranks)] for op in same])


def missing(simulation: Simulation) -> list[float]:
    """By rank: of the sum of the means, the share that the results lack in the end."""
    due = np.sum([op[0] for op in simulation.inputs], 0, np.float64)
    return [nmse(np.sum([op[rank] for op in simulation.results], 0, np.float64), due) for rank in range(4)]


@pytest.mark.parametrize("planes", [1, 2, 3])
def test_in_the_end_nothing_is_missing_of_what_coding_took(planes: int) -> None:
    assert max(missing(run("carry", planes=planes))) < 1e-4  # of 64 ops in 32-bit floats, and of 24 that fade
    assert min(missing(run("discard", planes=planes))) > 1e-2


def test_nor_if_contributions_are_late_and_means_too() -> None:
    late: dict[str, Any] = {
        "jitter_s": 2e-3,
        "loss": 0.02,
        "steering": True,
        "planes": 2,
        "packet_bytes": 256,
    }
    compute_s = np.full((LIVE + ZEROS, 4), 1e-3)
    compute_s[3:LIVE:3, 1] = 20e-3
    compute_s[LIVE:] = 50e-3
    simulation = run("carry", compute_s=compute_s.tolist(), window_ops=4096, **late)
    counters = simulation.native.counters
    assert sum(c.carried_contributions for c in counters) > 0
    assert max(missing(simulation)) < 0.1 * max(missing(run("discard", planes=2)))


def test_replicas_stay_equal_to_the_last_bit() -> None:
    for first, *others in run("carry").results:
        assert all(np.array_equal(first, other) for other in others)


def test_each_contribution_counts_with_the_weight_of_its_coding() -> None:
    """The owner has its own uncoded, so it weighs 1; each other weighs 1 less the distortion of 2 planes."""
    ranks, length, ops = 4, 4096, 30
    random = np.random.default_rng(5)
    each = random.standard_normal((ranks, length), np.float32)
    zeros = np.zeros(length, np.float32)
    scenario = Scenario(
        ranks=ranks, length=length, ops=ops, buckets=1, codec="planes", planes=2, deadline_s=1.0
    )
    inputs = [[(each[rank] if op == 0 else zeros).copy() for rank in range(ranks)] for op in range(ops)]
    results = simulate(scenario, inputs).results
    applied = np.array([op[0] for op in results], np.float64).sum(0)
    for shard in np.split(np.arange(length), ranks):
        candidates = []
        for owner in range(ranks):
            weights = np.where(np.arange(ranks) == owner, 1.0, 1 - 0.1194)
            candidates.append(nmse(applied[shard], weights / weights.sum() @ each[:, shard]))
        assert min(candidates) < 1e-3


def test_with_so_many_planes_that_coding_takes_nothing_nothing_is_kept() -> None:
    simulation, without = run("carry", planes=12), run("discard", planes=12)
    for ours, theirs in zip(simulation.results, without.results, strict=True):
        assert np.array_equal(ours[0], theirs[0])


# ---- by real ranks -----------------------------------------------------------------------------------------


def echo(
    directory: Path, *, before_zeros: Any = None, spoil: bool = False, **config: Any
) -> list[np.ndarray]:
    """What an op of zeros gives after one with values, by rank."""
    settings: dict[str, Any] = {"codec": "planes", "planes": 2, "deadline_s": 60.0, **config}
    with open_groups(directory, 2, **settings) as groups:
        random = np.random.default_rng(1)
        buckets = [random.standard_normal(4096, np.float32) for _ in groups]
        if spoil:
            buckets[1][100] = np.inf
        reports = allreduce(groups, buckets, key="bucket", loss_scale=8.0)
        for group, report in zip(groups, reports, strict=True):
            if before_zeros is not None:
                before_zeros(group, report)
        zeros = [np.zeros(4096, np.float32) for _ in groups]
        allreduce(groups, zeros, key="bucket", loss_scale=16.0 if config.get("lanes") else 8.0)
        return zeros


def test_what_coding_took_comes_with_the_next_op_and_at_its_loss_scale(tmp_path: Path) -> None:
    first, second = echo(tmp_path / "once", residue="carry")
    assert first.any()
    assert np.array_equal(first, second)
    twice, _ = echo(tmp_path / "twice", residue="carry", lanes=2)  # whose loss scale has doubled
    assert np.linalg.norm(twice) == pytest.approx(2 * np.linalg.norm(first), rel=1e-5)


def test_of_what_nobody_applied_nothing_comes(tmp_path: Path) -> None:
    def resynced(group: Any, report: Any) -> None:
        group._ops.resynced()

    def skipped(group: Any, report: Any) -> None:
        group.skipped([report])

    assert not echo(tmp_path / "resynced", residue="carry", before_zeros=resynced)[0].any()
    assert not echo(tmp_path / "skipped", residue="carry", before_zeros=skipped)[0].any()
    assert not echo(tmp_path / "spoilt", residue="carry", spoil=True)[0].any()
    assert not echo(tmp_path / "auto")[0].any()


@pytest.mark.parametrize("planes", [1, 2])
def test_it_comes_once_however_many_contribute(planes: int, tmp_path: Path) -> None:
    """One of two ranks only takes the means of most ops. What is carried must not grow by that."""
    ops, length = 40, 4096
    random = np.random.default_rng(2)
    due, applied = np.zeros(length), np.zeros(length)
    with open_groups(tmp_path, 2, codec="planes", planes=planes, residue="carry", deadline_s=60.0) as groups:
        for op in range(ops):
            each = random.standard_normal((2, length)).astype(np.float32) * (op < ops - 15)
            alone = op % 8 != 0 and op < ops - 15
            due += each[0] if alone else each.mean(0)
            works = [
                group.allreduce(bucket, key="bucket", contribute=not (alone and group.rank == 1))
                for group, bucket in zip(groups, each, strict=True)
            ]
            assert all(work.wait().status == "complete" for work in works)
            applied += each[0]
            assert np.square(each[0]).mean() < 10
    assert nmse(applied, due) < (0.1 if planes == 1 else 0.02)


def test_buckets_that_went_out_of_use_take_no_memory() -> None:
    residues = Residues()
    residues.of("of the first step", 10, 0.0)[:] = 1
    for _ in range(2 * UNUSED_OPS + 2):
        for key in ("a", "b"):
            residues.of(key, 10, 0.0)[:] = 1
    assert residues.of("a", 10, 0.0).all()
    assert not residues.of("of the first step", 10, 0.0).any()


def test_a_bucket_of_another_length_begins_anew() -> None:
    residues = Residues()
    residues.of("a", 10, 0.0)[:] = 1
    assert not residues.of("a", 11, 0.0).any()


# ---- who carries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizers", "residue", "decided"),
    [
        ([torch.optim.SGD], "auto", "carry"),
        ([torch.optim.AdamW], "auto", "discard"),
        ([torch.optim.SGD, torch.optim.AdamW], "auto", "discard"),
        ([], "auto", "discard"),
        ([torch.optim.AdamW], "carry", "carry"),
        ([torch.optim.SGD], "discard", "discard"),
    ],
)
def test_it_is_carried_for_optimizers_that_only_add(optimizers: Any, residue: str, decided: str) -> None:
    model: Any = SimpleNamespace(module=torch.nn.Linear(3, 3), bucket_bytes_cap=1 << 20)  # as DDP has it
    model.parameters = model.module.parameters
    given = [optimizer(model.parameters(), lr=0.1) for optimizer in optimizers]
    assert fitting(Config(residue=residue), model, given).residue == decided


def test_it_needs_planes_and_rule_9() -> None:
    row, rows = GridLayout(4), GridLayout(4, 2)
    assert carries_coding(Config(residue="carry"), "planes", row)
    for config, codec, grid in (
        (Config(residue="auto"), "planes", row),
        (Config(residue="carry", late="discard"), "planes", row),
        (Config(residue="carry", planes=12), "planes", row),
        (Config(residue="carry"), "raw", row),
        (Config(residue="carry"), "planes", rows),
    ):
        assert not carries_coding(config, codec, grid)


def test_two_planes_are_in_the_default_budget() -> None:
    for ranks in (3, 4, 8, 64):
        assert (
            predicted(ranks, 0.0, 2, 2, coding_carried=True) <= Config().budget < predicted(ranks, 0.0, 2, 2)
        )
