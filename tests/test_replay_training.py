"""DDP training and its replay, in real processes: the same bits after every step."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailcut import Ledger
from tests.launch import LIMIT_S, ROOT, torchrun, workers

STEPS = 12
CALM = {"drift_bound": 0, "deadline_s": 30.0, "codec": "planes"}
"""Nothing is late, also on a busy machine."""


def train_again(
    ledger: Path, directory: Path, steps: int, settings: dict[str, Any], *options: str
) -> subprocess.CompletedProcess[str]:
    script = [
        sys.executable, "-m", "tests.training.recorded", str(directory), str(steps), json.dumps(settings)
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return tailcut("replay", str(ledger), *options, "--", *script, env=env)


def tailcut(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("tailcut")), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,  # it starts as many processes as the run, and computes the same
        check=False,
    )


def train(
    place: Path, ranks: int, steps: int, settings: dict[str, Any], trouble: dict[str, Any]
) -> tuple[Ledger, list[dict[str, str]]]:
    """A run: its ledger, and by rank the digests of its replica by step."""
    was = place / "was"
    was.mkdir()
    env = {"TAILCUT_LEDGER": str(place / "ledger")}
    given = [str(was), str(steps), json.dumps(settings), json.dumps(trouble)]
    run = torchrun(ranks, "recorded", *given, env=env)
    assert run.code == 0, run.err
    return Ledger.open(place / "ledger"), digests(was, ranks)


def digests(place: Path, ranks: int) -> list[dict[str, str]]:
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(ranks)]


def replayed(
    place: Path, ranks: int, steps: int, settings: dict[str, Any], *options: str
) -> list[dict[str, str]]:
    again = place / "again"
    again.mkdir()
    replay = train_again(place / "ledger", again, steps, settings, *options)
    assert replay.returncode == 0, replay.stderr
    return digests(again, ranks)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def events(ledger: Ledger, rank: int) -> Counter[str]:
    return Counter(note.event for note in ledger.ranks[rank].notes)


def test_training_has_the_same_bits_again_at_every_step(tmp_path: Path) -> None:
    _, was = train(tmp_path, 2, STEPS, CALM, {})
    assert [len(of_rank) for of_rank in was] == [STEPS, STEPS]
    assert replayed(tmp_path, 2, STEPS, CALM) == was


@pytest.mark.long
def test_a_run_with_the_defaults_in_which_ranks_evaluate_and_freeze_has_the_same_bits_again(
    tmp_path: Path,
) -> None:
    trouble = {"0": {"evaluate_every": 30, "evaluate_s": 0.3}, "2": {"freeze_at": 20, "freeze_s": 1.0}}
    ledger, was = train(tmp_path, 3, 60, {}, trouble)
    assert events(ledger, 2)["skipped step"] > 0
    assert replayed(tmp_path, 3, 60, {}) == was


@pytest.mark.long
def test_a_rank_that_rejoined_has_the_same_bits_again(tmp_path: Path) -> None:
    settings = {"window_ops": 8}
    ledger, was = train(tmp_path, 3, 200, settings, {"1": {"freeze_at": 10, "freeze_s": 0.5}})
    assert events(ledger, 1)["rejoin"] > 0
    assert replayed(tmp_path, 3, 200, settings) == was


@pytest.mark.long
def test_replicas_that_were_corrected_have_the_same_bits_again(tmp_path: Path) -> None:
    """One is disturbed in the run, and in its replay too."""
    settings = {"deadline_s": 30.0, "disturbed": {"1": {"disturb_at": 5}}}
    ledger, was = train(tmp_path, 2, 100, settings, {})
    assert events(ledger, 1)["correction"] > 0
    assert replayed(tmp_path, 2, 100, settings) == was


@pytest.mark.long
def test_a_run_in_which_a_rank_was_killed_has_the_same_bits_again(tmp_path: Path) -> None:
    ledger_place, was = tmp_path / "ledger", tmp_path / "was"
    was.mkdir()
    settings = {"deadline_s": 1.0}
    given = [str(was), "40", json.dumps(settings), json.dumps({"2": {"die_at": 15}})]
    env = {"TAILCUT_LEDGER": str(ledger_place), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with workers(tmp_path, 3, "recorded", *given, env=env) as processes:
        ends = [process.end() for process in processes]
    assert [code for code, _ in ends] == [0, 0, -signal.SIGKILL], ends
    ledger = Ledger.open(ledger_place)
    assert not ledger.ranks[2].closed
    assert events(ledger, 0)["epoch"] > 0
    again = tmp_path / "again"
    again.mkdir()
    replay = train_again(ledger_place, again, 40, settings)
    assert replay.returncode == 0, replay.stderr
    assert "rank 2 died in the run, and so did its replay" in replay.stderr
    assert digests(again, 3) == digests(was, 3)


@pytest.mark.long
def test_a_single_op_is_stored_and_computed_again_by_the_command_line(tmp_path: Path) -> None:
    _, was = train(tmp_path, 2, STEPS, CALM, {})
    assert was
    file = tmp_path / "op7.npz"
    (tmp_path / "again").mkdir()
    stored = train_again(
        tmp_path / "ledger", tmp_path / "again", STEPS, CALM, "--op", "7", "--dump", str(file)
    )
    assert stored.returncode == 0, stored.stderr
    assert f"op 7 is in {file}" in stored.stdout
    alone = tailcut("replay", str(file))
    assert alone.returncode == 0, alone.stderr
    assert "the mean of 2 of 2" in alone.stdout
    assert alone.stdout.count("the same bits as then") == 2


@pytest.mark.long
def test_another_script_is_told_at_its_first_op(tmp_path: Path) -> None:
    train(tmp_path, 2, STEPS, CALM, {})
    (tmp_path / "again").mkdir()
    replay = train_again(
        tmp_path / "ledger", tmp_path / "again", STEPS, {**CALM, "disturbed": {"0": {"disturb_at": 5}}}
    )
    assert replay.returncode == 1
    assert "the replay parts from the record at op" in replay.stderr
