"""What holds for every framework."""

from __future__ import annotations

from typing import Any

from tests.launch import Run, torchrun

DEADLINE_S = 1.0
FROZEN_RANK = 1
FROZEN_S = 3
"""More than twice the deadline, so that a step that waits for the frozen rank fails. One that does not is far
below that, also on two busy cores (docs/frameworks.md has the longest that was seen)."""
LIMIT_S = 300
"""Only a hang takes longer: a framework takes long to import where many ranks share a core."""
NOISE = ("Traceback", "terminate called", "FATAL", "leaked", "Exception ignored")


def trained(ranks: int, script: str, *ways: str) -> Run:
    """Run a script of this directory under torchrun, in several ways one after the other: it ends well and
    quietly."""
    run = torchrun(ranks, f"frameworks.{script}", *ways, limit_s=LIMIT_S)
    assert run.code == 0, run.err
    assert not [word for word in NOISE if word in run.err], run.err
    return run


def assert_the_others_went_on(ranks: list[dict[str, Any]]) -> None:
    """One rank was frozen for seconds, and no step of the others took more than two deadlines."""
    frozen = ranks[FROZEN_RANK]
    others = [rank for index, rank in enumerate(ranks) if index != FROZEN_RANK]
    longest_s = max(rank["longest_s"] for rank in others)
    print(f"longest step of the others: {longest_s:.3f} s")  # pytest -rP shows it
    assert frozen["longest_s"] > 0.9 * FROZEN_S
    assert all(rank["steps"] > 50 for rank in others)
    assert longest_s <= 2 * DEADLINE_S, f"a step took {longest_s:.3f} s"
    assert frozen["skipped"] > 0
    assert len({rank["digest"] for rank in ranks}) == 1
