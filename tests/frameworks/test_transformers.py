"""The Trainer of Transformers: the same training as by itself, and a rank that stops."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.checks import assert_the_others_went_on, trained
from tests.launch import Run


@pytest.fixture(scope="module")
def two() -> Run:
    return trained(2, "train_transformers", "equal", "frozen")


@pytest.fixture(scope="module")
def equal(two: Run) -> list[dict[str, Any]]:
    return two.of("equal")


@pytest.mark.parametrize("mode", ["plain", "accumulation", "unused", "saved"])
def test_every_mode_trains_and_logs_as_without_tailcut(equal: list[dict[str, Any]], mode: str) -> None:
    for rank in equal:
        assert rank[mode]["difference"] == 0.0  # two ranks: there is only one order of addition
        assert rank[mode]["ops"] == (3 if mode == "accumulation" else 6)
        for figure in ("losses", "steps", "flos"):
            plain, ours = rank[mode][figure]
            assert ours == pytest.approx(plain)


def test_the_trainer_is_as_it_was_after_training(equal: list[dict[str, Any]]) -> None:
    assert all(rank["plain"]["restored"] for rank in equal)


def test_checkpoints_are_saved(equal: list[dict[str, Any]]) -> None:
    assert equal[0]["saved"]["files"] == ["checkpoint-3", "checkpoint-6"]


def test_what_still_waits_is_named_with_the_remedy(equal: list[dict[str, Any]]) -> None:
    text = " ".join(equal[0]["unused"]["warnings"])
    assert "include_num_input_tokens_seen='no'" in text
    assert "find_unused_parameters=False" in text
    assert equal[0]["plain"]["warnings"] == []


def test_a_rank_that_stops_does_not_stop_the_others(two: Run) -> None:
    assert_the_others_went_on(two.of("frozen"))
    assert [rank["global_step"] for rank in two.of("frozen")] == [150, 150]
