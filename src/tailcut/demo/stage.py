"""The demo's processes and its clock: starts them, freezes one, releases it, and leaves none behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tailcut.demo.display import Display
from tailcut.demo.worker import Board, Op, Script, work
from tailcut.errors import PeerError

WARM_OPS = 10
"""Ops before the clock starts: the first ones touch fresh memory."""

LAST_OPS = 8
"""How far ahead the end is announced, so that every rank learns of it in time."""

REDRAW_S = 0.1
FINISH_S = 30.0


@dataclass(frozen=True)
class Story:
    """A finished run, as measured."""

    script: Script
    started_at_s: float
    frozen_at_s: float
    released_at_s: float
    ops: list[list[Op]]
    """By rank, in order."""


@dataclass(frozen=True)
class Worker:
    process: BaseProcess
    connection: Connection


@contextmanager
def workers(script: Script, directory: Path) -> Iterator[list[Worker]]:
    """The running workers; all are dead on leaving."""
    context = multiprocessing.get_context("spawn")
    started: list[Worker] = []
    try:
        # The workers inherit the blocked Ctrl-C: it is the parent that answers it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(script.ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=work, args=(rank, script, directory, theirs), daemon=True)
                process.start()
                theirs.close()
                started.append(Worker(process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        yield started
    finally:
        for worker in started:
            worker.process.kill()  # ends a stopped process too
        for worker in started:
            worker.process.join()
            worker.connection.close()


class Stage:
    """The parent's side of a run."""

    def __init__(self, script: Script, cast: list[Worker], board: Board, display: Display) -> None:
        self._script = script
        self._workers = cast
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
        self._watch(lambda: self._board.finished(int(ops.min())))
        return Story(
            script,
            started_at_s,
            frozen_at_s,
            released_at_s,
            [self._last_word(r) for r in range(script.ranks)],
        )

    def _signal(self, number: signal.Signals, state: str) -> float:
        pid = self._workers[self._script.frozen_rank].process.pid
        assert pid is not None
        os.kill(pid, number)
        self._state_of_frozen = state
        return time.monotonic()

    def _watch(self, done: Callable[[], bool]) -> None:
        """Show the board until ``done()``; raises when a worker ends early."""
        sentinels = [worker.process.sentinel for worker in self._workers]
        while True:
            ended = wait(sentinels, timeout=0)
            self._display.show(self._board.entries, [self._state(rank) for rank in range(self._script.ranks)])
            if done():
                return
            for rank, sentinel in enumerate(sentinels):
                if sentinel in ended and not self._board.finished(int(self._board.entries["ops"][rank])):
                    self._last_word(rank)
            wait([s for s in sentinels if s not in ended], timeout=REDRAW_S)

    def _state(self, rank: int) -> str:
        if rank == self._script.frozen_rank and self._state_of_frozen:
            return self._state_of_frozen
        return "running" if self._board.entries["ops"][rank] else "starting"

    def _last_word(self, rank: int) -> list[Op]:
        """What a worker sends at its end; raises when it is not a list of ops."""
        worker = self._workers[rank]
        try:
            if not worker.connection.poll(FINISH_S):
                raise PeerError(f"rank {rank} did not finish within {FINISH_S:g} s")
            word = worker.connection.recv()
        except EOFError:
            worker.process.join()
            code = worker.process.exitcode or 0
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
            raise PeerError(f"the worker of rank {rank} {how}") from None
        if isinstance(word, str):
            raise PeerError(f"rank {rank}: {word}")
        ops: list[Op] = word
        return ops


def _after(seconds: float) -> Callable[[], bool]:
    """Whether ``seconds`` have passed since this call."""
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= end_s
