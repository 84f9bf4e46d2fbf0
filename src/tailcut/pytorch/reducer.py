"""Averages tensors through one tailcut group, in the order in which they come, and returns futures.

Owns the thread that completes futures, and the one that waits for copies from a device. When a future
completes, its tensor holds the result. Knows nothing of DDP or of process groups.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from tailcut.engine.ops import Run
from tailcut.errors import BehindError, TailcutError
from tailcut.group import Group, Work
from tailcut.pytorch.staging import Passage, passage_of
from tailcut.pytorch.startup import pass_on_news
from tailcut.pytorch.thread import start
from tailcut.report import Report
from tailcut.stats import Stats

EXIT_LINGER_S = 3.0
"""How long a rank that reaches the end of its script serves peers that are a little later."""

Listener = Callable[[Report], None]
Future = torch.futures.Future[Any]
Departure = tuple["Reduction", Passage]
Arrival = tuple["Reduction", Passage, Work]


class Reduction:
    """One tensor on its way. ``future`` completes with the tensor, or raises what went wrong."""

    def __init__(
        self,
        tensor: torch.Tensor,
        key: Hashable,
        scale: float,
        reliable: Sequence[Run] = (),
        loss_scale: float = 0.0,
    ) -> None:
        self.tensor = tensor
        self.key = key
        self.scale = scale
        self.reliable = reliable
        self.loss_scale = loss_scale
        self.error: Exception | None = None
        self._done = torch.futures.Future[Any](devices=[tensor.device] if tensor.is_cuda else None)
        # C++ does not see an exception that is set on a future, and one that a hook raises would break DDP.
        # So the future completes with a value, and its continuation raises.
        self.future: Future = self._done.then(self._result)

    def complete(self) -> None:
        self._done.set_result(self.tensor)

    def fail(self, error: Exception) -> None:
        self.error = error
        self.complete()

    def _result(self, _: Future) -> torch.Tensor:
        if self.error is not None:
            raise self.error.with_traceback(None)  # torch would print all of it, and it is of our threads
        return self.tensor


class Companion(Protocol):
    def close(self) -> None: ...


class Reducer:
    """Averages tensors through a group that it owns."""

    def __init__(
        self, group: Group, listener: Listener | None = None, farewell: Callable[[], None] | None = None
    ) -> None:
        self.group = group
        # A tensor must not meet another one of a group that has gone on. Grids have no such check.
        group._ops.in_order = group._ops.state is not None
        self._listener = listener
        self._farewell = farewell  # called once, when the group is closed
        self.rejoins = False
        """Whether a rank that is too far behind stays in the group. Without it, it gets an error."""
        self.behind: str | None = None
        """Why nothing is averaged any more: the others are too far ahead. Whoever makes the rank rejoin sets
        it to None."""
        self.companions: list[Companion] = []
        """What works beside it, and ends with it."""
        self._seen_ops = 0  # how many ops the totals had when the user asked for them last
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._departing = 0  # the number of reductions whose values are not on the host yet
        self._works: dict[Hashable, Work] = {}  # the latest work of each key
        self._departures: queue.SimpleQueue[Departure | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._threads = [
            start("tailcut-depart", self._departures, Reducer._submit_departed, self),
            start("tailcut-complete", self._arrivals, Reducer._complete_ended, self),
        ]
        _open_reducers.add(self)

    def average(
        self,
        tensor: torch.Tensor,
        key: Hashable = None,
        scale: float = 1,
        reliable: Sequence[Run] = (),
        loss_scale: float = 0.0,
    ) -> Reduction:
        """Start averaging ``tensor`` over the ranks, in place; returns at once. Errors are in the future.

        The result is ``scale`` times the mean. ``reliable`` and ``loss_scale`` are as in ``Group.allreduce``.
        """
        reduction = Reduction(tensor, key, scale, reliable, loss_scale)
        try:
            passage = passage_of(tensor)
            passage.depart()
        except Exception as error:
            reduction.fail(error)
            return reduction
        with self._lock:
            # A tensor that is already on the host must not overtake one that is still being copied: the
            # order of ops must be the same on all ranks.
            if self._closed or (passage.immediate and not self._departing):
                self._submit(reduction, passage)  # if closed, this fails; nobody serves the queues any more
            else:
                self._departing += 1
                self._departures.put((reduction, passage))
        return reduction

    def stats(self) -> Stats:
        """The totals, for the user. A user that has seen the last ones needs no farewell."""
        stats = self.group.stats()
        self._seen_ops = stats.ops
        return stats

    def fall_behind(self, report: Report) -> BehindError:
        """Leave the group after it has gone on without this rank. Returns the error that says so."""
        # The others are at another tensor than the next one here, so leave before it is sent.
        self.group.close(linger_s=0.0)
        return BehindError(
            f"{report}; window_ops={self.group.config.window_ops} is the most it may be behind. "
            "Its parameters are out of date: restart it from a checkpoint, or with its group; with "
            "attach(..., optimizer=) and rejoin=True it fetches the state of the others"
        )

    def close(self, linger_s: float | None = None) -> None:
        """Close the group, as ``Group.close`` does. What is in flight ends with an error."""
        if os.getpid() != self._process:
            return
        try:
            self.group.close(linger_s)
        finally:
            with self._lock:  # what was handed over before is in the queues, before the end
                self._closed = True
            queues: tuple[queue.SimpleQueue[Any], ...] = (self._departures, self._arrivals)
            for thread, work in zip(self._threads, queues, strict=True):
                work.put(None)
                if thread is not threading.current_thread():
                    thread.join()
            for companion in self.companions:
                companion.close()
            _open_reducers.discard(self)
            farewell, self._farewell = self._farewell, None
            if farewell is not None and self.group.stats().ops != self._seen_ops:
                farewell()

    def __del__(self) -> None:
        try:
            if hasattr(self, "_threads"):  # the model is gone, and nobody has closed this
                self.close(linger_s=0.0)
        except Exception:  # names that closing needs may be gone when the interpreter ends
            pass  # nobody can handle it here, and Python would print it

    def _submit(self, reduction: Reduction, passage: Passage) -> None:
        if self.behind is not None:  # the others are at another tensor
            reduction.tensor.detach().zero_()
            reduction.complete()
            return
        try:
            key = reduction.key
            if key in self._works:
                with suppress(TailcutError):  # after an error DDP does not wait for its other buckets
                    self._works[key].wait()
            work = self.group.allreduce(
                passage.arrive().reshape(-1),
                key,
                reliable=reduction.reliable,
                loss_scale=reduction.loss_scale,
            )
        except Exception as error:
            reduction.fail(error)
        else:
            if key is not None:
                self._works[key] = work
            self._arrivals.put((reduction, passage, work))

    def _submit_departed(self, departure: Departure) -> None:
        reduction, passage = departure
        with suppress(Exception):  # it comes again under the lock, which must not be held while this blocks
            passage.arrive()
        with self._lock:
            self._departing -= 1
            self._submit(reduction, passage)

    def _complete_ended(self, arrival: Arrival) -> None:
        """Complete the future of an op. The order is that of submission, in which DDP waits too."""
        reduction, passage, work = arrival
        try:
            report = work.wait()
            pass_on_news(self.group)
            behind = report.status == "behind"
            if behind and not self.rejoins:
                raise self.fall_behind(report)
            if behind:
                self.behind = self.behind or f"is {report.behind_ops} ops behind"
            with passage.go_back():
                if behind:
                    reduction.tensor.detach().zero_()
                elif reduction.scale != 1:
                    reduction.tensor.detach().mul_(reduction.scale)
                if self._listener is not None and not behind:
                    self._listener(report)
                reduction.complete()
        except Exception as error:
            reduction.fail(error)


_open_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads before the interpreter ends: one that wakes later takes the process down."""
    raised = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for reducer in list(_open_reducers):
        reducer.close(0.0 if raised else min(EXIT_LINGER_S, reducer.group.config.deadline_s))
