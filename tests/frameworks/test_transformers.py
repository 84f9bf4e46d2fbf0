"""The Trainer of Transformers: the same training as by itself, and a rank that stops."""

from __future__ import annotations

import pytest

from tests.frameworks.checks import assert_the_others_went_on, trained
from tests.launch import Run


@pytest.fixture(scope="module")
def equal() -> Run:
    return trained(2, "train_transformers", "equal")


@pytest.mark.parametrize("mode", ["plain", "accumulation", "unused", "saved"])
def test_every_mode_trains_and_logs_as_without_tailcut(equal: Run, mode: str) -> None:
    for rank in equal.results:
        assert rank[mode]["difference"] == 0.0  # two ranks: there is only one order of addition
        assert rank[mode]["ops"] == (3 if mode == "accumulation" else 6)
        for figure in ("losses", "steps", "flos"):
            plain, ours = rank[mode][figure]
            assert ours == pytest.approx(plain)


def test_the_trainer_is_as_it_was_after_training(equal: Run) -> None:
    assert all(rank["plain"]["restored"] for rank in equal.results)


def test_checkpoints_are_saved(equal: Run) -> None:
    assert equal.results[0]["saved"]["files"] == ["checkpoint-3", "checkpoint-6"]


def test_what_still_waits_is_named_with_the_remedy(equal: Run) -> None:
    text = " ".join(equal.results[0]["unused"]["warnings"])
    assert "include_num_input_tokens_seen='no'" in text
    assert "find_unused_parameters=False" in text
    assert equal.results[0]["plain"]["warnings"] == []


def test_a_rank_that_stops_does_not_stop_the_others() -> None:
    run = trained(2, "train_transformers", "frozen")
    assert_the_others_went_on(run)
    assert {rank["global_step"] for rank in run.results} == {150}
