"""HSDP across replicas under torchrun: by the backend with a configuration, and by hook."""

from __future__ import annotations

import pytest

from tests.launch import Run, torchrun

STEPS = 5


@pytest.fixture(scope="module")
def four() -> Run:
    run = torchrun(4, "hybrid", env={"TAILCUT_ADAPTIVE": "0"})
    assert run.code == 0, run.err
    errors = [result["error"] for rank in run.results for result in rank.values() if "error" in result]
    assert not errors, errors[0]
    return run


@pytest.mark.parametrize("way", ["backend_with_its_configuration", "hook"])
def test_replicas_train_as_with_gloo(four: Run, way: str) -> None:
    for rank in four.results:
        assert rank[way]["ops"] == STEPS
        assert rank[way]["lost"] == 0
        assert rank[way]["difference"] <= 1e-6  # of parameters around 0.06: rounding of another order


def test_reductions_of_bfloat16_take_sixteen_bits_a_coordinate(four: Run) -> None:
    for rank in four.results:
        result = rank["sixteen_bits"]
        # Two replicas: in each op a rank sends half of its shard as SCATTER and half as GATHER.
        bits = 8 * result["sent_bytes"] / (STEPS * result["coordinates"])
        assert 16 <= bits <= 18  # headers, feedback
        assert result["difference"] <= 2e-3  # both round to 8 bits, in another order


@pytest.mark.parametrize(("what", "words"), [("whole", "call fully_shard first"), ("twice", "mesh['shard']")])
def test_a_model_that_is_sharded_otherwise_is_refused_with_the_remedy(
    four: Run, what: str, words: str
) -> None:
    assert all(words in rank["refusals"][what] for rank in four.results)
