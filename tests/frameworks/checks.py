"""What holds for every framework."""

from __future__ import annotations

from tests.launch import Run, torchrun

DEADLINE_S = 0.3
FROZEN_RANK = 1
FROZEN_S = 3
LIMIT_S = 300
"""Only a hang takes longer: a framework takes long to import where many ranks share a core."""
NOISE = ("Traceback", "terminate called", "FATAL", "leaked", "Exception ignored")


def trained(ranks: int, script: str, way: str) -> Run:
    """Run a script of this directory under torchrun; it ends well and quietly."""
    run = torchrun(ranks, f"frameworks.{script}", way, limit_s=LIMIT_S)
    assert run.code == 0, run.err
    assert not [word for word in NOISE if word in run.err], run.err
    return run


def assert_the_others_went_on(run: Run) -> None:
    """One rank was frozen for seconds, and no step of the others took more than two deadlines."""
    frozen = run.results[FROZEN_RANK]
    others = [rank for index, rank in enumerate(run.results) if index != FROZEN_RANK]
    assert frozen["longest_s"] > 0.9 * FROZEN_S
    assert all(rank["steps"] > 50 for rank in others)
    assert max(rank["longest_s"] for rank in others) <= 2 * DEADLINE_S
    assert frozen["skipped"] > 0
    assert len({rank["digest"] for rank in run.results}) == 1
