"""Stalls outside tailcut: which collective it is, who calls it, what avoids it."""

from __future__ import annotations

import sys
import types

import pytest

from tailcut.pytorch.stalls import COLLECTIVES, OTHER_REMEDY, REMEDIES, StallWatch, stall_of
from tests.launch import torchrun

FrameType = types.FrameType


def frame_of(*calls: tuple[str, str]) -> FrameType:
    """The innermost frame of functions that call each other, each with its module."""
    source = "def {name}(inner, last):\n    return inner[0](inner[1:], last) if inner else last()\n"
    functions = []
    for module, name in calls:
        scope: dict[str, object] = {"__name__": module}
        exec(source.format(name=name), scope)
        functions.append(scope[name])
    first, *inner = functions
    found: FrameType = first(inner, lambda: sys._getframe(1))  # type: ignore[operator]
    return found


GATHER = (COLLECTIVES, "all_gather")


@pytest.mark.parametrize(
    ("caller", "remedy"),
    [
        (("lightning.pytorch.loops", "_broadcast_sigterm_tensor"), REMEDIES["_broadcast_sigterm_tensor"]),
        (("lightning.fabric.utilities", "sync"), REMEDIES["lightning"]),
        (("transformers.trainer", "store_flos"), REMEDIES["transformers"]),
        (("torch.nn.parallel.distributed", "_sync_buffers"), REMEDIES["_sync_buffers"]),
        (("users_own", "train"), OTHER_REMEDY),
    ],
)
def test_the_remedy_follows_from_who_calls(caller: tuple[str, str], remedy: str) -> None:
    stall = stall_of(frame_of(("__main__", "main"), caller, GATHER))
    assert stall is not None
    assert stall.collective == "all_gather"
    assert stall.caller.startswith(".".join(caller))
    assert stall.remedy == remedy


def test_the_collective_that_was_called_is_named_not_one_inside_it() -> None:
    stall = stall_of(frame_of(("users_own", "train"), (COLLECTIVES, "all_gather_object"), GATHER))
    assert stall is not None
    assert stall.collective == "all_gather_object"


def test_computing_is_no_stall_and_neither_is_what_tailcut_calls() -> None:
    assert stall_of(None) is None
    assert stall_of(frame_of(("users_own", "train"))) is None
    assert stall_of(frame_of(("users_own", "train"), ("tailcut.pytorch.resync", "copy_from"), GATHER)) is None


def test_one_call_counts_once_from_the_deadline_on_and_is_told_once() -> None:
    told: list[str] = []
    watch = StallWatch(1.0, told.append)
    one, other = frame_of(("users_own", "train"), GATHER), frame_of(("users_own", "train"), GATHER)
    for now_s in (0.0, 0.5, 0.99):
        watch.note(now_s, one)
    assert (watch.stalls, told) == (0, [])
    for now_s in (1.0, 2.5):
        watch.note(now_s, one)
    assert (watch.stalls, watch.stalled_s, len(told)) == (1, 2.5, 1)
    for now_s in (3.0, 4.5):
        watch.note(now_s, other)
    assert (watch.stalls, watch.stalled_s, len(told)) == (2, 4.0, 1)


def test_a_collective_in_every_step_is_told_when_a_rank_stands_still() -> None:
    run = torchrun(2, "stalling", "gather")
    assert run.code == 0, run.err
    waiting, late = run.results
    assert waiting["stalls"] == 1
    assert waiting["stalled_s"] >= 0.3
    assert len(waiting["warnings"]) == 1
    assert "torch.distributed.all_gather called by __main__.train" in waiting["warnings"][0]
    assert (late["stalls"], late["warnings"]) == (0, [])
    assert waiting["threads"] == 0


def test_without_one_nothing_is_told() -> None:
    run = torchrun(2, "stalling", "nothing")
    assert run.code == 0, run.err
    assert [rank["stalls"] for rank in run.results] == [0, 0]
