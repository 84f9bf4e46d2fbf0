"""attach when ranks die, freeze, fall behind or end in every way a process can: nobody waits for ever."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launch import Worker, workers

NOISE = ("leaked", "terminate called", "FATAL", "Fatal", "Exception ignored")


def attached(group: list[Worker]) -> None:
    assert [worker.hear() for worker in group] == ["attached"] * len(group)


def step(*group: Worker) -> list[dict[str, Any]]:
    for worker in group:
        worker.say("step")
    return [worker.hear() for worker in group]


def end(*group: Worker) -> None:
    for worker in group:
        worker.say("end")
    for worker in group:
        code, err = worker.end()
        assert code == 0, err
        assert not [word for word in (*NOISE, "Warning") if word in err], err


def test_a_killed_rank_costs_its_share_and_the_others_stay_identical(tmp_path: Path) -> None:
    waiting = json.dumps({"deadline_s": 1.0, "adaptive": False})  # a busy host leaves nobody out
    with workers(tmp_path, 3, "follower", waiting) as (one, dead, two):
        attached([one, dead, two])
        for _ in range(3):
            results = step(one, dead, two)
            assert {result["status"] for result in results} == {"complete"}
            assert len({result["digest"] for result in results}) == 1
        assert results[0]["warnings"] == []
        dead.signal(signal.SIGKILL)
        digests = {results[0]["digest"]}
        for _ in range(4):
            results = step(one, two)
            for result in results:
                assert (result["status"], result["missing_from"]) == ("partial", [1])
                assert 0 < result["lost_frac"] < 0.6
            assert results[0]["digest"] == results[1]["digest"]
            digests.add(results[0]["digest"])
        assert len(digests) == 5  # they went on learning
        end(one, two)


def test_the_share_of_a_killed_rank_comes_back(tmp_path: Path) -> None:
    quiet = json.dumps({"deadline_s": 1.0, "straggler_share": 1.0})
    with workers(tmp_path, 3, "follower", quiet) as (one, dead, two):
        attached([one, dead, two])
        for _ in range(3):  # DDP rebuilds its buckets
            step(one, dead, two)
        dead.signal(signal.SIGKILL)
        for _ in range(60):  # torch's store takes its time
            results = step(one, two)
            if all(result["lost_frac"] == 0 for result in results):
                break
        for _ in range(3):
            results = step(one, two)
            assert [(result["status"], result["lost_frac"]) for result in results] == [("complete", 0)] * 2
            assert results[0]["digest"] == results[1]["digest"]
        end(one, two)


def test_a_rank_frozen_for_less_than_the_window_catches_up(tmp_path: Path) -> None:
    with workers(tmp_path, 3, "follower", json.dumps({"deadline_s": 1.0})) as (one, frozen, two):
        attached([one, frozen, two])
        for _ in range(3):
            step(one, frozen, two)
        frozen.signal(signal.SIGSTOP)
        for _ in range(3):
            frozen.say("step")
            for result in step(one, two):
                assert (result["status"], result["missing_from"]) == ("partial", [1])
        frozen.signal(signal.SIGCONT)
        assert [frozen.hear()["step"] for _ in range(3)] == [4, 5, 6]
        results = step(one, frozen, two)
        assert {result["status"] for result in results} == {"complete"}
        assert [result["step"] for result in results] == [7] * 3
        end(one, frozen, two)


def test_a_rank_that_raises_leaves_and_the_others_get_on_without_it(tmp_path: Path) -> None:
    with workers(tmp_path, 3, "follower", json.dumps({"deadline_s": 60.0})) as (one, leaver, two):
        attached([one, leaver, two])
        for _ in range(3):
            step(one, leaver, two)
        leaver.say("raise")
        code, err = leaver.end()
        assert code == 1
        assert "RuntimeError: rank 1 has had enough" in err
        for _ in range(3):
            results = step(one, two)
            assert {result["status"] for result in results} == {"complete"}  # it said goodbye: no waiting
            assert results[0]["digest"] == results[1]["digest"]
        end(one, two)


def test_a_rank_too_far_behind_gets_one_clear_error_and_the_others_go_on(tmp_path: Path) -> None:
    config = json.dumps({"deadline_s": 0.3, "window_ops": 4})
    with workers(tmp_path, 3, "follower", config) as (one, frozen, two):
        attached([one, frozen, two])
        for _ in range(3):
            step(one, frozen, two)
        frozen.signal(signal.SIGSTOP)
        for _ in range(8):
            results = step(one, two)
        frozen.signal(signal.SIGCONT)
        for _ in range(
            8
        ):  # it may find the first results in its socket, before it hears how far the others are
            (result,) = step(frozen)
            if "error" in result:
                break
        error = result["error"]
        assert error.count("BehindError") == 1
        assert "ops behind" in error
        assert "restart it from a checkpoint" in error
        end(frozen)
        for number in (12, 13):
            results = step(one, two)
            assert [result["step"] for result in results] == [number] * 2
        end(one, two)


NO_THREADS = {"threads_at_exit": 0}
WAYS = [
    "falls_off_the_end",
    "destroys_its_process_group",
    "closes",
    "raises",
    "raises_in_a_block",
    "exits",
    "interrupted",
    "terminated",
    "forks",
]


@pytest.mark.long
def test_however_a_process_ends_it_ends_alone_and_quietly(tmp_path: Path) -> None:
    with workers(tmp_path, len(WAYS), "ending", "3.0") as started:
        assert [worker.hear() for worker in started] == ["trained"] * len(WAYS)
        ranks = dict(zip(WAYS, started, strict=True))
        for worker in started:
            worker.say("go")
        for way, number in (("interrupted", signal.SIGINT), ("terminated", signal.SIGTERM)):
            assert ranks[way].hear() == "waiting"
            ranks[way].signal(number)
        assert ranks["closes"].hear() == {"sockets": 0, "threads": 0}
        assert [ranks["forks"].hear() for _ in range(2)] == [{"child": 0}, {"batches": 4}]
        for way in WAYS:
            assert way == "terminated" or ranks[way].hear() == NO_THREADS
        ends = {way: worker.end() for way, worker in ranks.items()}
        assert [worker.left_behind() for worker in started] == [[]] * len(WAYS)
    assert {way: code for way, (code, _) in ends.items()} == {
        "falls_off_the_end": 0,
        "destroys_its_process_group": 0,
        "closes": 0,
        "raises": 1,
        "raises_in_a_block": 1,
        "exits": 3,
        "interrupted": -signal.SIGINT,
        "terminated": -signal.SIGTERM,
        "forks": 0,
    }
    for way, (_, err) in ends.items():
        expected = {"raises": 1, "raises_in_a_block": 1, "interrupted": 1}.get(way, 0)
        assert err.count("Traceback") == expected, err
        assert not [word for word in NOISE if word in err], err
        assert "Warning" not in err or way == "interrupted", err  # alone in its op, which it says
