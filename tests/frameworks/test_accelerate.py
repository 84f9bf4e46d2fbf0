"""Accelerate: attach on what it has prepared, states saved and loaded, its launcher, a rank that stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.checks import assert_the_others_went_on, trained
from tests.launch import ROOT, Run


@pytest.fixture(scope="module")
def two() -> Run:
    return trained(2, "loop_accelerate", "equal", "frozen")


def test_a_loop_trains_as_with_plain_ddp_and_its_state_is_saved_and_loaded(two: Run) -> None:
    for rank in two.of("equal"):
        assert rank["difference"] == 0.0  # two ranks: there is only one order of addition
        assert rank["ops"] == rank["counted"] == 6
    assert len({digest for rank in two.of("equal") for digest in rank["digests"]}) == 1


def test_a_rank_that_stops_does_not_stop_the_others(two: Run) -> None:
    assert_the_others_went_on(two.of("frozen"))


def test_a_launcher_that_starts_a_single_process_is_named_with_the_remedy(tmp_path: Path) -> None:
    accelerate = Path(sys.executable).with_name("accelerate")
    script = ["-m", "tests.frameworks.loop_accelerate", "single"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(accelerate), "launch", "--cpu", "--num_processes", "2", *script]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    refused = json.loads((tmp_path / "0.json").read_text())["single"]["refused"]
    assert "`accelerate launch --cpu` starts a single one" in refused
    assert "torchrun" in refused
