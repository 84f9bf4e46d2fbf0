"""Ray Train on a local cluster: the same training as with plain DDP, a worker that fails, one that stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tailcut.ray import Reporter
from tests.frameworks.checks import assert_the_others_went_on
from tests.launch import ROOT

LIMIT_S = 900
"""A cluster takes a minute to start on two busy cores, and a failed group of workers as long again."""


def run_on_a_cluster(directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "RESULTS": str(directory),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by itself Ray gives way to everything else on the machine
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ray")
    run_on_a_cluster(directory, "-m", "tests.frameworks.cluster_ray")
    return directory


def results(cluster: Path, loop: str) -> list[dict[str, Any]]:
    return [json.loads((cluster / f"{loop}-{rank}.json").read_text()) for rank in range(2)]


def test_workers_train_as_with_plain_ddp(cluster: Path) -> None:
    for rank in results(cluster, "equal"):
        assert rank == {"difference": 0.0, "ops": 6}  # two ranks: there is only one order of addition


def test_a_worker_that_stops_does_not_stop_the_others(cluster: Path) -> None:
    assert_the_others_went_on(results(cluster, "frozen"))


def test_reports_by_a_thread_reach_ray_from_every_worker(cluster: Path) -> None:
    lines = (cluster / "reports").read_text().splitlines()
    *steps, last = [json.loads(line) for line in lines]
    assert steps == [[step, step] for step in range(10, 151, 10)]
    assert last == [None, None]  # the report of the training thread itself


def test_a_group_that_ray_starts_again_after_a_failure_meets_anew(cluster: Path) -> None:
    assert (cluster / "failed").exists()  # by the first life, and the results are of the second
    assert [rank["ops"] for rank in results(cluster, "equal")] == [6, 6]


def test_a_report_that_waits_for_others_does_not_hold_up_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    others_have_come = threading.Event()
    heard: list[dict[str, int]] = []

    def report(metrics: dict[str, int]) -> None:
        others_have_come.wait(60)
        heard.append(metrics)

    monkeypatch.setattr("ray.train.report", report)
    reporter = Reporter(every_steps=2)
    for step in (1, 2, 3, 7):  # 4 to 6 were skipped
        reporter.step(step, {"at": step})
    assert heard == []
    others_have_come.set()
    reporter.close()
    assert heard == [{"step": 2, "at": 2}, {"step": 4, "at": 7}, {"step": 6, "at": 7}]


def test_an_error_of_a_report_is_raised_where_the_worker_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("the run was aborted")

    monkeypatch.setattr("ray.train.report", refuse)
    reporter = Reporter(every_steps=1)
    reporter.step(1, {})
    with pytest.raises(RuntimeError, match="the run was aborted"):
        reporter.close()
    with pytest.raises(RuntimeError, match="the run was aborted"):
        reporter.step(2, {})


def test_the_example_trains(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "ray_train.py")
    done = run_on_a_cluster(tmp_path, example, "--steps", "30", "--storage", str(tmp_path))
    assert "'ops': 30" in done.stdout
    assert list(tmp_path.rglob("model.pt"))
