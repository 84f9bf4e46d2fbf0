"""What a GradScaler means for what is carried: late parts change their scale, and a skipped op gives back."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tailcut import ConfigError, Freeze, Report, Scenario, Simulation, simulate
from tailcut.engine import keys
from tailcut.engine.keys import Keys
from tailcut.engine.loss_scale import tag_of
from tailcut.pytorch.scaling import Scaling
from tests.groups import allreduce, open_groups
from tests.launch import Run, torchrun

# ---- in virtual time -----------------------------------------------------------------------------------

LIVE, QUIET = 8, 24
"""Ops of a bucket: those with gradients, and those with zeros in which what was late comes in."""

UNIT = 840
"""Means over up to eight ranks are whole, and so everything is exact."""


def lossy(seed: int, *, skips: int = 0, **fields: Any) -> Scenario:
    """Ranks are late, packets are lost, and some ranks freeze. Loss scales are powers of two."""
    rng = np.random.default_rng(seed)
    ranks, buckets = int(rng.choice([2, 4, 8])), int(rng.integers(1, 4))
    live, ops = buckets * LIVE, buckets * (LIVE + QUIET)
    late_s = float(rng.choice([0.01, 0.08, 0.15]))
    compute_s = np.concatenate(
        [rng.uniform(0, late_s, (live, ranks)), rng.uniform(0, 1e-3, (ops - live, ranks))]
    )
    begins_s = rng.uniform(0, 0.3, ranks)
    given: dict[str, Any] = {
        "length": int(rng.choice([65, 1000, 5000])),
        "compute_s": compute_s.tolist(),
        "loss": float(rng.choice([0.01, 0.1, 0.3])),
        "bytes_per_s": float(rng.choice([2e6, 2e7])),
        "freezes": [Freeze(r, begins_s[r], begins_s[r] + 0.15) for r in range(ranks) if rng.random() < 0.3],
        "loss_scales": (2.0 ** rng.integers(0, 6, ops)).tolist(),
        "skips": rng.choice(live, skips, replace=False).tolist(),
    }
    return Scenario(ranks=ranks, ops=ops, buckets=buckets, seed=seed, window_ops=256, **{**given, **fields})


def run(scenario: Scenario) -> Simulation:
    rng = np.random.default_rng(scenario.seed)
    live = scenario.buckets * LIVE
    scales = scenario.loss_scales or [1.0] * scenario.ops
    inputs = [
        [
            (rng.integers(-20, 20, scenario.length) * (UNIT * scales[op] * (op < live))).astype(np.float32)
            for _ in range(scenario.ranks)
        ]
        for op in range(scenario.ops)
    ]
    return simulate(scenario, inputs=inputs)


def applied_less_due(simulation: Simulation) -> np.ndarray:
    """By bucket and rank: what it has applied, without the loss scale, less the mean gradients."""
    scenario = simulation.scenario
    scales = scenario.loss_scales or [1.0] * scenario.ops
    apart = np.zeros((scenario.buckets, scenario.ranks, scenario.length))
    for op in range(scenario.ops):
        if op not in scenario.skips:
            mean = np.mean(np.array(simulation.inputs[op], np.float64), axis=0)
            for rank, result in enumerate(simulation.results[op]):
                apart[op % scenario.buckets, rank] += (result.astype(np.float64) - mean) / scales[op]
    return apart


def carried(simulation: Simulation) -> tuple[int, int]:
    counters = simulation.native.counters
    return sum(c.carried_contributions for c in counters), sum(c.carried_means for c in counters)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_late_is_applied_exactly_whatever_the_loss_scale_has_become(seed: int) -> None:
    simulation = run(lossy(seed))
    assert not applied_less_due(simulation).any()


def test_the_runs_above_carry_contributions_and_means() -> None:
    assert np.sum([carried(run(lossy(seed))) for seed in range(12)], axis=0).min() > 10_000


def test_a_skipped_op_gives_back_what_it_had_used_and_voids_what_is_late_for_it() -> None:
    simulations = [run(lossy(seed, skips=3)) for seed in range(30)]
    for simulation in simulations:
        assert not applied_less_due(simulation).any(), simulation.scenario.seed
    assert np.sum([carried(simulation) for simulation in simulations], axis=0).min() > 10_000


def late_once(**fields: Any) -> Simulation:
    """Two ranks, one bucket. Rank 1 is late in the first op by more than the others wait."""
    compute_s = [[0.0, 0.0] for _ in range(6)]
    compute_s[0][1] = 0.08
    scenario = Scenario(
        ranks=2,
        length=128,
        ops=6,
        buckets=1,
        compute_s=compute_s,
        loss_scales=[4.0, 1.0] + [2.0] * 4,
        **fields,
    )
    inputs = [[np.full(128, 64.0 * (rank + 1) * (op == 0), np.float32) for rank in (0, 1)] for op in range(6)]
    return simulate(scenario, inputs=inputs)


def test_late_parts_enter_the_next_op_at_its_scale() -> None:
    simulation = late_once()
    first, second = (simulation.results[op][0] for op in (0, 1))
    assert not np.array_equal(first, np.full(128, 96.0))
    np.testing.assert_array_equal(first / 4 + second, np.full(128, 96.0 / 4))


def test_late_parts_that_a_skipped_op_used_enter_the_one_after_it() -> None:
    simulation = late_once(skips=[1])
    first, skipped, third = (simulation.results[op][0] for op in (0, 1, 2))
    assert skipped.any()
    np.testing.assert_array_equal(first / 4 + third / 2, np.full(128, 96.0 / 4))


def test_what_is_late_for_a_skipped_op_is_given_up() -> None:
    simulation = late_once(skips=[0])
    assert not any(result.any() for op in simulation.results[1:] for result in op)


# ---- tags and numbers ----------------------------------------------------------------------------------


def test_a_tag_is_the_upper_half_of_the_scale() -> None:
    assert [tag_of(scale) for scale in (0.0, 1.0, 65536.0, 65536.0 * (1 + 2**-9))] == [
        0,
        0x3F80,
        0x4780,
        0x4780,
    ]


@pytest.mark.parametrize("scale", [-1.0, math.inf, math.nan, 1e39])
def test_what_is_no_loss_scale_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="must be a positive float32"):
        tag_of(scale)


def test_keys_with_one_hash_get_numbers_of_their_own_in_the_order_of_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashes = {"a": 7, "b": 7, "c": 8, "d": 0xFFFFFFFF, "e": 0xFFFFFFFF, "f": 0}
    monkeypatch.setattr(keys, "hash_of", lambda key: hashes[key])
    known = Keys()
    expected = {"a": 7, "b": 8, "c": 9, "d": 0xFFFFFFFF, "e": 1, "f": 2}
    assert {key: known.number_of(key) for key in hashes} == expected
    assert {key: known.number_of(key) for key in reversed(hashes)} == dict(reversed(expected.items()))
    assert known.number_of(None) == 0


def test_buckets_whose_keys_have_one_hash_are_not_mixed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "hash_of", lambda key: 7)
    with open_groups(tmp_path, 2, deadline_s=60.0) as groups:
        for _ in range(3):
            for key, length in (("long", 1000), ("short", 10)):
                reports = allreduce(groups, [np.ones(length, np.float32)] * 2, key=key)
                assert [report.status for report in reports] == ["complete"] * 2
        assert [group._ops.number_of("short") for group in groups] == [8, 8]


def test_a_group_tells_the_lane_of_a_key_of_its_skipped_ops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = ("a", "b", "c", "d", None)
    with open_groups(tmp_path, 2, deadline_s=60.0, lanes=2) as groups:
        vectors = [np.ones(10, np.float32) for _ in groups]
        reports = [allreduce(groups, vectors, key=key, loss_scale=8.0)[0] for key in named]
        told: list[tuple[int, int, int]] = []

        def lane(index: int) -> SimpleNamespace:
            return SimpleNamespace(skipped=lambda first, last: told.append((index, first, last)))

        with monkeypatch.context() as patched:
            patched.setattr(groups[0]._ops, "lanes", [lane(0), lane(1)])
            groups[0].skipped(reports)
        assert told == [(keys.hash_of(r.key) % 2, r.seq, r.seq) for r in reports if r.key is not None]
        assert {index for index, _, _ in told} == {0, 1}
        groups[0].skipped(reports)  # and the core takes it


# ---- the scaler ----------------------------------------------------------------------------------------


class Scaler:
    """A GradScaler, as far as it is read."""

    def __init__(self) -> None:
        self.scale, self.enabled = 8.0, True

    def get_scale(self) -> float:
        return self.scale

    def is_enabled(self) -> bool:
        return self.enabled


def sgd() -> torch.optim.Optimizer:
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    return torch.optim.SGD([parameter], lr=1.0)


class Passes:
    """Backward passes of one bucket each. Their ops are 0, 1, 2, …"""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.scaler = Scaler()
        self.scaling = Scaling(self.scaler, optimizer, window_ops=8)
        self.ops = 0

    def backward(self) -> list[int]:
        """Returns the ops that are told as skipped."""
        skipped = [report.seq for report in self.scaling.begin_pass()]
        self.scaling.listen(Report(self.ops, "complete", 1, 0.1))
        self.ops += 1
        return skipped


def test_a_scale_that_went_down_means_that_the_last_pass_was_not_applied() -> None:
    passes = Passes(None)
    assert passes.backward() == passes.backward() == []
    passes.scaler.scale = 4.0
    assert passes.backward() == [1]
    assert passes.scaling.loss_scale == 4.0
    passes.scaler.scale = 16.0
    assert passes.backward() == passes.backward() == []


def test_with_the_optimizer_it_means_all_passes_since_its_last_step() -> None:
    optimizer = sgd()
    passes = Passes(optimizer)
    passes.backward()
    optimizer.step()
    passes.backward()
    passes.backward()
    passes.scaler.scale = 4.0
    assert passes.backward() == [1, 2]
    optimizer.step()
    passes.scaler.scale = 2.0  # by hand: the step was taken
    assert passes.backward() == []


def test_a_fused_optimizer_is_called_for_a_step_that_it_skips() -> None:
    optimizer = sgd()
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    passes = Passes(optimizer)
    for _ in range(2):
        assert passes.backward() == []
        optimizer.step()
    passes.scaler.scale = 4.0
    assert passes.backward() == [1]
    optimizer.step()
    assert passes.backward() == []


def test_after_a_resync_a_smaller_scale_is_no_skipped_step() -> None:
    passes = Passes(None)
    passes.backward()
    passes.scaling.restart()
    passes.scaler.scale = 4.0
    assert passes.backward() == []


def test_a_scaler_that_is_not_enabled_has_no_scale() -> None:
    passes = Passes(None)
    passes.scaler.enabled = False
    passes.backward()
    assert passes.scaling.loss_scale == 0.0


# ---- in real processes ---------------------------------------------------------------------------------

TRAINED = {"calm": 1, "optimizer_unknown": 1, "two_passes_a_step": 2, "fused": 1, "two_lanes": 1}
"""Cases, and how many backward passes a step has."""


@pytest.fixture(scope="module")
def scaled() -> Run:
    run = torchrun(3, "scaled")
    assert run.code == 0, run.err
    for rank in run.results:
        for name, result in rank.items():
            assert "error" not in result, f"{name}: {result['error']}"
    return run


@pytest.mark.parametrize("case", TRAINED)
def test_with_an_inf_on_one_rank_scalers_and_replicas_stay_equal(scaled: Run, case: str) -> None:
    results = [rank[case] for rank in scaled.results]
    assert len({result["digest"] for result in results}) == 1
    assert all(result["scales"] == results[0]["scales"] for result in results)
    assert all(result["finite"] and result["split_verdicts"] == 0 for result in results)


@pytest.mark.parametrize(("case", "passes"), TRAINED.items())
def test_the_core_is_told_of_every_skipped_step(scaled: Run, case: str, passes: int) -> None:
    for rank in scaled.results:
        result = rank[case]
        scales = result["scales"]
        downs = sum(later < earlier for earlier, later in pairwise(scales[:-1]))
        assert downs >= 5
        assert result["told"] == [passes * result["buckets"]] * downs


def test_a_rank_is_warned_once_of_a_step_that_others_skipped(scaled: Run) -> None:
    for rank in scaled.results:
        (text,) = rank["warnings_with_carry"]["of_split_verdicts"]
        assert "another rank skipped a step" in text
        assert "attachment.resync()" in text


def test_parts_that_did_not_come_in_time_are_warned_of_only_if_they_never_follow(scaled: Run) -> None:
    for rank in scaled.results:
        assert rank["warnings_with_carry"]["of_missing_parts"] == []
        (text,) = rank["warnings_with_discard"]["of_missing_parts"]
        assert "did not come in time" in text
