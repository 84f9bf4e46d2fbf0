"""``tailcut demo``: four local workers average vectors while one of them is frozen for a moment and released.

Owns the workers, the clock of the script and the display. Uses only public names of the group.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from tailcut.config import Config
from tailcut.errors import ConfigError, PeerError
from tailcut.group import Group
from tailcut.report import Report
from tailcut.store import FileStore

PR_SET_PDEATHSIG = 1  # linux/prctl.h
WARM_OPS = 10
"""Ops before the clock starts: the first ones touch fresh memory."""
LAST_OPS = 8
"""How far ahead the end is announced, so that every rank still learns of it in time."""
REDRAW_S = 0.1
FINISH_S = 30.0

_BOARD = np.dtype([("ops", np.int64), ("last_s", np.float64), ("lost", np.float64)])
Board = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens, and when. The freeze must cost fewer ops than Config.window_ops."""

    ranks: int = 4
    frozen_rank: int = 2
    count: int = 1 << 20
    """Coordinates: 4 MB."""
    compute_s: float = 0.008
    deadline_s: float = 0.25
    before_s: float = 3.0
    freeze_s: float = 2.0
    after_s: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.frozen_rank < self.ranks:
            raise ConfigError(f"frozen_rank={self.frozen_rank} must be between 0 and ranks - 1 = {self.ranks - 1}")


@dataclass(frozen=True)
class Op:
    """One op on one rank; the clock is the machine's monotonic one."""

    entered_s: float
    ended_s: float
    report: Report


@dataclass(frozen=True)
class Story:
    """A finished run, as measured."""

    script: Script
    frozen_at_s: float
    released_at_s: float
    behind_at_release: int
    """Ops between the released rank and the fastest one, at the moment of release."""
    ops: list[list[Op]]
    """By rank, in order."""


def run(script: Script | None = None, stream: TextIO | None = None) -> Story:
    """Play the script with a live display. Leaves no process behind, whatever happens."""
    script = script or Script()
    stream = stream or sys.stdout
    with tempfile.TemporaryDirectory(prefix="tailcut-demo-") as name:
        directory = Path(name)
        board = _open_board(directory, script.ranks, create=True)
        stop = _open_stop(directory, create=True)
        with _workers(script, directory) as (processes, connections):
            draw = _Screen(stream) if stream.isatty() else _Log(stream)
            story = _Direction(script, processes, board, stop, draw).play()
            story.ops.extend(_collect(processes, connections))
    return story


def _open_board(directory: Path, ranks: int, create: bool = False) -> Board:
    """What the workers show: one row per rank, each written by its rank only."""
    return np.memmap(directory / "board", dtype=_BOARD, mode="w+" if create else "r+", shape=(ranks,))


def _open_stop(directory: Path, create: bool = False) -> npt.NDArray[np.int64]:
    """The number of ops after which all end; written by the parent only."""
    stop: npt.NDArray[np.int64] = np.memmap(
        directory / "stop", dtype=np.int64, mode="w+" if create else "r+", shape=(1,)
    )
    if create:
        stop[0] = np.iinfo(np.int64).max
    return stop


def _work(rank: int, script: Script, directory: Path, connection: Connection) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    board, stop = _open_board(directory, script.ranks), _open_stop(directory)
    gradient = np.random.default_rng(rank).standard_normal(script.count, np.float32)
    bucket = np.empty_like(gradient)
    ops: list[Op] = []
    config = Config(deadline_s=script.deadline_s)
    with Group(rank, script.ranks, FileStore(directory / "store"), config) as group:
        while not ops or ops[-1].report.seq + 1 < stop[0]:
            bucket[:] = gradient
            time.sleep(script.compute_s)  # stands for the backward pass
            entered_s = time.monotonic()
            report = group.allreduce(bucket).wait()
            if report.status == "behind":
                group.resynced()  # the demo has no state that a peer would have to send
            ops.append(Op(entered_s, time.monotonic(), report))
            board[rank] = (report.seq + 1, report.elapsed_s, board[rank]["lost"] + report.lost_frac)
    connection.send(ops)


@contextmanager
def _workers(script: Script, directory: Path) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        # The workers inherit the blocked Ctrl-C: it is the parent that answers it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(script.ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(rank, script, directory, theirs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        yield processes, connections
    finally:
        for process in processes:
            process.kill()  # ends a stopped process too
        for process in processes:
            process.join()
        for connection in connections:
            connection.close()


def _collect(processes: list[BaseProcess], connections: list[Connection]) -> list[list[Op]]:
    ops: list[list[Op]] = []
    for rank, (process, connection) in enumerate(zip(processes, connections, strict=True)):
        try:
            if not connection.poll(FINISH_S):
                raise PeerError(f"rank {rank} did not finish within {FINISH_S:g} s")
            ops.append(connection.recv())
        except EOFError:
            process.join()
            raise PeerError(f"the worker of rank {rank} ended with exit code {process.exitcode}") from None
    return ops


class _Direction:
    """The parent's side of a run: freezes, releases, watches and shows."""

    def __init__(
        self,
        script: Script,
        processes: list[BaseProcess],
        board: Board,
        stop: npt.NDArray[np.int64],
        draw: _Screen | _Log,
    ) -> None:
        self._script = script
        self._processes = processes
        self._board = board
        self._stop = stop
        self._draw = draw
        self._frozen = False
        self._released = False

    def play(self) -> Story:
        script = self._script
        self._watch(lambda: bool(self._board["ops"].min() >= WARM_OPS))
        self._watch(after(script.before_s))
        frozen_at_s = self._signal(signal.SIGSTOP)
        self._watch(after(script.freeze_s))
        behind = self._behind()
        released_at_s = self._signal(signal.SIGCONT)
        self._watch(lambda: self._behind() <= 1)
        self._watch(after(script.after_s))
        self._stop[0] = self._board["ops"].max() + LAST_OPS
        self._watch(lambda: bool(self._board["ops"].min() >= self._stop[0]))
        return Story(script, frozen_at_s, released_at_s, behind, [])

    def _signal(self, number: signal.Signals) -> float:
        pid = self._processes[self._script.frozen_rank].pid
        assert pid is not None
        os.kill(pid, number)
        self._frozen = number == signal.SIGSTOP
        self._released = not self._frozen
        return time.monotonic()

    def _behind(self) -> int:
        return int(self._board["ops"].max() - self._board["ops"][self._script.frozen_rank])

    def _watch(self, done: Callable[[], bool]) -> None:
        """Show the board until ``done()``; raises when a worker ends early."""
        while not done():
            finished = bool(self._board["ops"].min() >= self._stop[0])
            for rank, process in enumerate(self._processes):
                if process.exitcode is not None and not finished:
                    raise PeerError(f"the worker of rank {rank} ended with exit code {process.exitcode}")
            self._draw.show(self._board, [self._state(rank) for rank in range(self._script.ranks)])
            wait([process.sentinel for process in self._processes], REDRAW_S)

    def _state(self, rank: int) -> str:
        if rank == self._script.frozen_rank:
            if self._frozen:
                return "FROZEN"
            if self._released and self._behind() > 1:
                return "catching up"
        return "running" if self._board["ops"][rank] else "starting"


def after(seconds: float) -> Callable[[], bool]:
    """Whether ``seconds`` have passed since this call."""
    end_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= end_s


def _rows(board: Board, states: list[str]) -> list[str]:
    rows = ["rank       ops   last op    lost   state"]
    for rank, (entry, state) in enumerate(zip(board, states, strict=True)):
        lost = entry["lost"] / max(1, entry["ops"])
        rows.append(f"{rank:>4}{entry['ops']:>10}{1e3 * entry['last_s']:>7.1f} ms{lost:>8.2%}   {state}")
    return rows


class _Screen:
    """A table that redraws itself in place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._height = 0

    def show(self, board: Board, states: list[str]) -> None:
        rows = _rows(board, states)
        up = f"\x1b[{self._height}A" if self._height else ""
        self._stream.write(up + "".join(f"\x1b[K{row}\n" for row in rows))
        self._stream.flush()
        self._height = len(rows)


class _Log:
    """A line whenever a state changes, for pipes and files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._states: list[str] = []

    def show(self, board: Board, states: list[str]) -> None:
        if states != self._states:
            ranks = ", ".join(f"rank {r} {s} (op {n})" for r, (s, n) in enumerate(zip(states, board["ops"], strict=True)))
            print(ranks, file=self._stream, flush=True)
            self._states = states
