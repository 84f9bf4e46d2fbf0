"""Lightning: the strategy, the callback, Fabric, and a rank that stops."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from tailcut.lightning.sigterm import SigtermWatch
from tests.frameworks.checks import LIMIT_S, assert_the_others_went_on, trained
from tests.launch import Run, workers

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two() -> Run:
    return trained(2, "fit_lightning", "equal", "frozen")


@pytest.fixture(scope="module")
def whole() -> Results:
    return trained(3, "fit_lightning", "whole").of("whole")


@pytest.mark.parametrize("mode", ["plain", "bf16-mixed", "accumulation", "clipping"])
def test_every_mode_trains_as_with_plain_ddp(two: Run, mode: str) -> None:
    for rank in two.of("equal"):
        assert rank[mode]["difference"] == 0.0  # two ranks: there is only one order of addition
        assert rank[mode]["ops"] == (3 if mode == "accumulation" else 6)


def test_the_callback_attaches_for_every_fit_and_leaves_validation_alone(whole: Results) -> None:
    for rank in whole:
        assert rank["first_ops"] == rank["second_ops"] == rank["steps"] == 6
        assert rank["validated"]["val"] > 0
    assert len({rank["digest"] for rank in whole}) == 1


def test_figures_are_logged_as_metrics(whole: Results) -> None:
    assert {"tailcut/ops", "tailcut/skipped_steps", "tailcut/drift"} <= set(whole[0]["columns"])


def test_checkpoints_are_saved(whole: Results) -> None:
    assert "last.ckpt" in whole[0]["saved"]


def test_attach_takes_what_fabric_sets_up(whole: Results) -> None:
    assert [rank["fabric_ops"] for rank in whole] == [6, 6, 6]


def test_the_mean_of_integers_is_logged_over_the_backend(whole: Results) -> None:
    assert [rank["integers"] for rank in whole] == [8.0] * 3


def test_processes_that_lightning_spawns_are_attached(tmp_path: Path) -> None:
    with workers(tmp_path, 1, "frameworks.fit_lightning", "spawned", limit_s=LIMIT_S) as [rank]:
        code, err = rank.end()
    assert code == 0, err
    assert sorted(path.read_text() for path in tmp_path.glob("spawned-*")) == ["6", "6"]


def test_a_rank_that_stops_does_not_stop_the_others(two: Run) -> None:
    assert_the_others_went_on(two.of("frozen"))


def test_all_ranks_end_when_one_has_received_sigterm(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "run"}
    with workers(tmp_path, 2, "frameworks.fit_lightning", "endless", env=env, limit_s=LIMIT_S) as ranks:
        assert [rank.hear() for rank in ranks] == ["training", "training"]
        ranks[1].signal(signal.SIGTERM)
        ends = [rank.end() for rank in ranks]
    assert [code for code, _ in ends] == [0, 0], ends  # so Lightning ends after SIGTERM


class FrozenStore:
    """Does not answer: its process stands still."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def check(self, _: list[str]) -> bool:
        return self.answers.wait(60)

    def set(self, _: str, __: str) -> None:
        self.answers.wait(60)


def test_asking_for_sigterm_does_not_wait_for_the_store() -> None:
    store = FrozenStore()
    watch = SigtermWatch(store, "group")
    began_s = time.monotonic()
    assert not watch.received
    watch.tell()
    assert watch.received
    assert time.monotonic() - began_s < 1
    store.answers.set()
    watch.close()


def test_what_one_rank_tells_the_others_hear() -> None:
    store = HashStore()
    one, other = SigtermWatch(store, "group"), SigtermWatch(store, "group")
    one.tell()
    other._thread.join(60)  # it ends when it has heard
    assert other.received
    for watch in (one, other):
        watch.close()
