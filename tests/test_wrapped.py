"""What frameworks hand to tailcut, under torchrun: wrapped models and optimizers, integers, sums alone."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from tailcut import ConfigError, FileStore, Group
from tailcut.pytorch.reducer import Reducer
from tailcut.pytorch.unwrapping import ddp_of
from tests.launch import Run, torchrun


@pytest.fixture(scope="module")
def two() -> Run:
    run = torchrun(2, "wrapped")
    assert run.code == 0, run.err
    errors = [result["error"] for rank in run.results for result in rank.values() if "error" in result]
    assert not errors, errors[0]
    return run


@pytest.mark.parametrize("way", ["compiled_first", "in_fabric"])
def test_a_wrapped_model_with_several_optimizers_trains_as_with_gloo(two: Run, way: str) -> None:
    for rank in two.results:
        assert rank[way]["ops"] > 0
        assert rank[way]["difference"] <= 1e-6


@pytest.mark.parametrize("way", ["compiled_first", "in_fabric"])
def test_a_step_of_several_optimizers_is_one_step(two: Run, way: str) -> None:
    assert all(rank[way]["even"] for rank in two.results)


def test_resync_copies_the_state_of_every_optimizer(two: Run) -> None:
    one, other = (rank["resync_of_several_optimizers"] for rank in two.results)
    assert one == other
    assert one["lr"] == [0.01, 0.1]


@pytest.mark.parametrize(
    ("what", "words"),
    [("twice", "step the same parameter"), ("none", "an empty list"), ("other", "optimizer is a int")],
)
def test_optimizers_that_cannot_be_attached_are_refused(two: Run, what: str, words: str) -> None:
    assert all(words in rank["refusals"][what] for rank in two.results)


def test_the_mean_of_integers_drops_what_the_division_leaves_over(two: Run) -> None:
    for rank in two.results:
        assert rank["means_of_integers"]["found"] == [[2, 4, 50]] * 3
        assert rank["means_of_integers"]["signed"] == [-2, -1]
        assert rank["means_of_integers"]["ops"] == 0


def test_rank_0_warns_once_if_sums_are_all_that_a_process_group_is_given(two: Run) -> None:
    first, second = (rank["only_sums"] for rank in two.results)
    assert len(first["sums"]) == 1
    assert "tailcut.attach(ddp)" in first["sums"][0]
    assert "bound_sums=True" in first["sums"][0]
    assert second["sums"] == []
    assert first["after_a_mean"] == first["largest"] == []


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"ACCELERATE_USE_CPU": "True", "WORLD_SIZE": "1"}, ["accelerate launch --cpu", "torchrun"]),
        ({"ACCELERATE_USE_CPU": "False", "WORLD_SIZE": "1"}, ["the only process", "torchrun"]),
        ({"WORLD_SIZE": "2"}, ["wrap the model in DDP", "HSDP"]),
    ],
)
def test_a_model_without_ddp_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], words: list[str]
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="not Linear") as refused:
        ddp_of(nn.Linear(1, 1))
    assert [word for word in words if word not in str(refused.value)] == []


def test_what_goes_wrong_when_a_group_is_collected_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at the end of the interpreter, when names that closing needs are gone."""
    group = Group(0, 1, FileStore(tmp_path))
    reducer = Reducer(group)
    reducer.average(torch.ones(4)).future.wait()
    reducer.close()
    with mock.patch("tailcut.pytorch.reducer.os", None), mock.patch("tailcut.engine.ops.os", None):
        del reducer, group
        gc.collect()
    assert "Exception ignored" not in capsys.readouterr().err
