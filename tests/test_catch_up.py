"""attach on a rank that was away: it takes the means of the steps that it has missed, and computes none."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailcut import Ledger
from tests.launch import Worker, workers

MISSED = 20
QUICK = json.dumps({"deadline_s": 2.0})


def tell(word: str, *group: Worker) -> list[dict[str, Any]]:
    for worker in group:
        worker.say(word)
    return [worker.hear() for worker in group]


def train(steps: int, *group: Worker, word: str = "step") -> list[dict[str, Any]]:
    for _ in range(steps):
        results = tell(word, *group)
    return results


def end(*group: Worker) -> str:
    for worker in group:
        worker.say("end")
    ends = [worker.end() for worker in group]
    assert [code for code, _ in ends] == [0] * len(group), ends
    return "".join(err for _, err in ends)


def freeze(frozen: Worker, *others: Worker, poison: bool = False) -> list[dict[str, Any]]:
    """The others do steps without it, and it hears so. Returns how they are."""
    frozen.signal(signal.SIGSTOP)
    train(MISSED // 2, *others)
    if poison:
        tell("poison", *others)
    results = train(MISSED - MISSED // 2 - poison, *others)
    frozen.signal(signal.SIGCONT)
    tell(str(MISSED * results[0]["buckets"]), frozen)
    return results


@pytest.mark.parametrize("mode", ["plain", "scaled"])
def test_a_rank_that_was_frozen_skips_the_steps_that_it_has_missed(tmp_path: Path, mode: str) -> None:
    ledgers = tmp_path / "ledgers"
    with workers(tmp_path, 3, "skipper", QUICK, mode, env={"TAILCUT_LEDGER": str(ledgers)}) as group:
        one, frozen, two = group
        assert [worker.hear() for worker in group] == ["attached"] * 3
        before = train(8, *group)[0]
        assert before["buckets"] > 1
        others = freeze(frozen, one, two, poison=mode == "scaled")
        assert [other["step"] for other in others] == [8 + MISSED] * 2
        assert [other["forwards"] for other in others] == [8 + MISSED] * 2

        # The step after those that are over is the last of the others: they have not begun a later one.
        (back,) = tell("step", frozen)
        assert back["skipped"] == MISSED - 1
        assert back["step"] == 8 + MISSED
        assert back["forwards"] == before["forwards"] + 1
        assert back["batch"] == 8  # it was drawn before
        assert (back["scale"], back["lr"]) == (others[0]["scale"], others[0]["lr"])
        assert back["gradients"] == 0

        results = train(4, *group)
        assert [result["batch"] for result in results] == [8 + MISSED + 3] * 3
        assert [result["skipped"] for result in results] == [0, MISSED - 1, 0]
        results = tell("resync", *group)
        assert len({result["digest"] for result in results}) == 1
        results = train(2, *group)
        assert len({result["digest"] for result in results}) == 1
        assert len({result["scale"] for result in results}) == 1
        said = end(*group)
        assert said.count("tailcut: rank 1 was 19 steps behind: took their means in") == 1
    for rank, ledger in Ledger.open(ledgers).ranks.items():
        events = Counter(note.event for note in ledger.notes)
        assert events["skipped step"] == (MISSED - 1 if rank == 1 else 0)
        assert events["resync"] == 1
        assert events["parameters"] >= (rank != 1)
        assert (events["not applied"] > 0) == (mode == "scaled")


def test_the_others_do_not_wait_for_who_is_away(tmp_path: Path) -> None:
    with workers(tmp_path, 3, "skipper", json.dumps({"deadline_s": 30.0})) as group:
        one, frozen, two = group
        assert [worker.hear() for worker in group] == ["attached"] * 3
        train(8, *group)
        results = freeze(frozen, one, two)
        assert [result["ended_by_deadline"] for result in results] == [0, 0]
        tell("step", frozen)
        results = train(6, *group)
        assert [result["ended_by_deadline"] for result in results] == [0, 0, 0]
        end(*group)


def test_nobody_waits_for_a_rank_that_evaluates(tmp_path: Path) -> None:
    with workers(tmp_path, 3, "skipper", json.dumps({"deadline_s": 30.0})) as group:
        evaluating, one, two = group
        assert [worker.hear() for worker in group] == ["attached"] * 3
        train(8, *group)
        tell("evaluate", evaluating)
        results = train(2, one, two)  # its word may come after the first of them has begun
        assert [result["awaited"][0] for result in results] == [False, False]
        train(MISSED, one, two)
        tell("step", evaluating)
        results = train(4, *group)
        assert [result["awaited"] for result in results] == [[True] * 3] * 3
        end(*group)


def test_nothing_is_skipped_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    with workers(tmp_path, 3, "skipper", QUICK) as group:
        one, frozen, two = group
        assert [worker.hear() for worker in group] == ["attached"] * 3
        train(8, *group)
        tell("accumulate", *group)
        freeze(frozen, one, two)
        (back,) = tell("step", frozen)  # completes the step that it was in
        assert (back["skipped"], back["step"]) == (0, 9)
        (back,) = tell("step", frozen)
        assert (back["skipped"], back["step"]) == (MISSED - 2, 8 + MISSED)
        freeze(frozen, one, two)
        (back,) = tell("accumulate", frozen)  # the first pass of a step
        assert (back["skipped"], back["step"]) == (2 * MISSED - 3, 7 + 2 * MISSED)
        tell("step", frozen)
        results = tell("resync", *group)
        assert len({result["digest"] for result in results}) == 1
        end(*group)
