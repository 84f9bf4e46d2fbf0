"""Watches for stalls outside tailcut: a collective of somebody else in which a rank waits for all the others.

tailcut bounds its own ops. A step that also calls a collective of torch.distributed stops with the slowest
rank, and nothing would tell why. A thread looks at the Python stack of the training thread now and then.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import NamedTuple

COLLECTIVES = "torch.distributed.distributed_c10d"

REMEDIES = {
    "_broadcast_sigterm_tensor": "use tailcut.lightning.TailcutStrategy or TailcutCallback",
    "transformers": "call tailcut.transformers.attach(trainer) before trainer.train()",
    "accelerate": "gather figures once in many steps, or behind the loop",
    "lightning": "log without sync_dist=True, and validate and save in fewer steps",
    "ray": "call ray.train.report() once in many steps",
    "_sync_buffers": "give DDP forward_sync_buffers=False, or broadcast_buffers=False before torch 2.13",
}
"""By a function on the stack, or by the package that calls: what avoids the collective."""

OTHER_REMEDY = "call it once in many steps, or not while training"


LOOKS = 4
"""So many in a deadline: what takes longer than one and a quarter is found."""


class Stall(NamedTuple):
    """A collective that the training thread is in."""

    frame: int
    """Identifies the call: the same as long as it lasts."""
    collective: str
    caller: str
    remedy: str


class StallWatch:
    """Watches the thread that calls ``enter``. ``warn`` is called once, with what to tell."""

    def __init__(self, limit_s: float, warn: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._warn = warn
        self.stalls = 0
        """Collectives of others that took longer than the deadline."""
        self.stalled_s = 0.0
        """How long these took together."""
        self._thread_id: int | None = None
        self._current: Stall | None = None
        self._since_s = 0.0
        self._counted_s = 0.0  # of the current one
        self._ended = threading.Event()
        # It does not keep the watch alive: who drops the model need not close anything.
        target = partial(_watch, weakref.ref(self), self._ended, limit_s / LOOKS)
        self._thread = threading.Thread(target=target, name="tailcut-stalls", daemon=True)

    def enter(self) -> None:
        """A step begins, in the thread that is to be watched."""
        if self._thread_id is None:
            self._thread_id = threading.get_ident()
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __del__(self) -> None:
        self.close()

    def look(self, now_s: float) -> None:
        """See where the training thread is."""
        self.note(now_s, sys._current_frames().get(self._thread_id or 0))

    def note(self, now_s: float, frame: FrameType | None) -> None:
        """The training thread is in ``frame``."""
        found = stall_of(frame)
        if found is None or self._current is None or found.frame != self._current.frame:
            self._current, self._since_s, self._counted_s = found, now_s, 0.0
            return
        waited_s = now_s - self._since_s
        if waited_s < self._limit_s:
            return
        if self._counted_s == 0:
            self.stalls += 1
            if self.stalls == 1:
                self._tell(found)
        self.stalled_s += waited_s - self._counted_s
        self._counted_s = waited_s

    def _tell(self, stall: Stall) -> None:
        self._warn(
            f"tailcut: this rank has waited for {self._limit_s:.3g} s and more outside tailcut, in "
            f"torch.distributed.{stall.collective} called by {stall.caller}, which waits for every rank; "
            f"{stall.remedy}. Told once; stats().outside_stalls keeps count"
        )


def _watch(there: weakref.ref[StallWatch], ended: threading.Event, every_s: float) -> None:
    while not ended.wait(every_s):
        watch = there()
        if watch is None:
            return
        watch.look(time.monotonic())
        del watch


def stall_of(frame: FrameType | None) -> Stall | None:
    """The collective that a thread is in; None if there is none, or if tailcut itself has called it."""
    collective: FrameType | None = None
    stack = list(_outwards(frame))
    for entry in stack:
        if _module(entry) == COLLECTIVES and not entry.f_code.co_name.startswith("_"):
            collective = entry  # the outermost: all_gather_object calls all_gather
    if collective is None or any(_module(entry).startswith("tailcut.") for entry in stack):
        return None
    callers = [entry for entry in _outwards(collective) if not _module(entry).startswith("torch.distributed")]
    caller = callers[0] if callers else collective
    place = f"{_module(caller)}.{caller.f_code.co_name} (line {caller.f_lineno})"
    return Stall(id(collective), collective.f_code.co_name, place, _remedy(callers))


def _remedy(callers: list[FrameType]) -> str:
    for entry in callers:
        for key in (entry.f_code.co_name, _module(entry).partition(".")[0]):
            if key in REMEDIES:
                return REMEDIES[key]
    return OTHER_REMEDY


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
