"""The demo's clock: watches the workers, freezes one, releases it, and collects what they measured."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tailcut.demo.display import Display
from tailcut.demo.worker import Board, Op, Script
from tailcut.workers import Workers

WARM_OPS = 10
"""Ops before the clock starts: the first ones touch fresh memory."""

LAST_OPS = 8
"""How far ahead the end is announced, so that every rank learns of it in time."""

REDRAW_S = 0.1


@dataclass(frozen=True)
class Story:
    """A finished run, as measured."""

    script: Script
    started_at_s: float
    frozen_at_s: float
    released_at_s: float
    ops: list[list[Op]]
    """By rank, in order."""


class Director:
    """The parent's side of a run."""

    def __init__(self, script: Script, workers: Workers, board: Board, display: Display) -> None:
        self._script = script
        self._pids = workers.pids
        self._messages = workers.messages(REDRAW_S)
        self._ops: dict[int, list[Op]] = {}
        self._board = board
        self._display = display
        self._state_of_frozen = ""

    def play(self) -> Story:
        script, ops = self._script, self._board.entries["ops"]
        self._watch(lambda: bool(ops.min() >= WARM_OPS))
        started_at_s = time.monotonic()
        self._watch(_after(script.before_s))
        frozen_at_s = self._signal(signal.SIGSTOP, "FROZEN")
        self._watch(_after(script.freeze_s))
        released_at_s = self._signal(signal.SIGCONT, "catching up")
        self._watch(lambda: bool(ops.max() - ops[script.frozen_rank] <= 1))
        self._state_of_frozen = ""
        self._watch(_after(script.after_s))
        self._board.stop_after(int(ops.max()) + LAST_OPS)
        self._watch(lambda: len(self._ops) == script.ranks)
        by_rank = [self._ops[rank] for rank in range(script.ranks)]
        return Story(script, started_at_s, frozen_at_s, released_at_s, by_rank)

    def _signal(self, number: signal.Signals, state: str) -> float:
        os.kill(self._pids[self._script.frozen_rank], number)
        self._state_of_frozen = state
        return time.monotonic()

    def _watch(self, done: Callable[[], bool]) -> None:
        """Show the board until ``done()``; raises when a worker fails."""
        while True:
            self._display.show(self._board.entries, [self._state(rank) for rank in range(self._script.ranks)])
            if done():
                return
            message = next(self._messages, None)
            if message is not None:
                rank, ops = message
                assert isinstance(ops, list)
                self._ops[rank] = ops

    def _state(self, rank: int) -> str:
        if rank == self._script.frozen_rank and self._state_of_frozen:
            return self._state_of_frozen
        return "running" if self._board.entries["ops"][rank] else "starting"


def _after(seconds: float) -> Callable[[], bool]:
    """Whether ``seconds`` have passed since this call."""
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= end_s
