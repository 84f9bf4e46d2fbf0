"""Directs the run of one side: watches the workers, freezes one, releases it, and collects the replicas."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tailcut.tools.demo.freeze.rows import Glance, Rows
from tailcut.tools.demo.freeze.worker import Board, Replica, Script, Side
from tailcut.tools.workers import Workers

REDRAW_S = 0.05


@dataclass(frozen=True)
class Run:
    """The training of one side, as it was measured."""

    side: Side
    frozen_at_s: float
    released_at_s: float
    replicas: list[Replica]
    """What each rank ended with."""


@dataclass(frozen=True)
class Story:
    """The same script, played on both sides one after the other."""

    script: Script
    tailcut: Run
    gloo: Run


class Director:
    """The parent's side of a run."""

    def __init__(self, side: Side, script: Script, workers: Workers, board: Board, rows: Rows) -> None:
        self._side = side
        self._script = script
        self._pids = workers.pids
        self._messages = workers.messages(REDRAW_S)
        self._replicas: dict[int, Replica] = {}
        self._board = board
        self._rows = rows
        self._state = "starting"

    def play(self) -> Run:
        script, steps = self._script, self._board.entries["steps"]
        self._watch(lambda: bool(steps.min() >= 1))
        self._state = "training"
        self._watch(lambda: bool(steps[script.frozen_rank] >= script.freeze_at_step))
        frozen_at_s = self._signal(signal.SIGSTOP, "FROZEN")
        self._watch(_after(script.freeze_s))
        released_at_s = self._signal(signal.SIGCONT, "released")
        self._watch(lambda: bool(steps.max() - steps[script.frozen_rank] <= 1))
        self._state = "training"
        self._watch(lambda: len(self._replicas) == script.ranks)
        self._state = "done"
        self._watch(lambda: True)
        replicas = [self._replicas[rank] for rank in range(script.ranks)]
        return Run(self._side, frozen_at_s, released_at_s, replicas)

    def _signal(self, number: signal.Signals, state: str) -> float:
        os.kill(self._pids[self._script.frozen_rank], number)
        self._state = f"rank {self._script.frozen_rank} {state}"
        return time.monotonic()

    def _watch(self, done: Callable[[], bool]) -> None:
        """Show the board until ``done()``. Raises when a worker fails."""
        while True:
            self._rows.show(self._glance())
            if done():
                return
            message = next(self._messages, None)
            if message is not None:
                rank, replica = message
                assert isinstance(replica, Replica)
                self._replicas[rank] = replica

    def _glance(self) -> Glance:
        first = self._board.entries[0]
        return Glance(
            self._side,
            int(first["steps"]),
            self._script.steps,
            float(first["loss"]),
            float(first["last_s"]),
            self._state,
        )


def _after(seconds: float) -> Callable[[], bool]:
    """Whether ``seconds`` have passed since this call."""
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= end_s
