"""Local worker processes that never outlive their parent. They are started, heard and killed together.

Knows nothing of what the workers do.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from tailcut.errors import PeerError, TailcutError

PR_SET_PDEATHSIG = 1  # linux/prctl.h

Send = Callable[[object], None]
Target = Callable[..., None]
"""A worker calls it as ``target(rank, send, *arguments)``. It must be importable."""


@dataclass(frozen=True)
class _Failure:
    text: str
    expected: bool
    """Whether it was a TailcutError, whose text says enough. Any other error is shown with its traceback."""


class Workers:
    """``count`` processes of one target. A context manager: leaving it kills those that still run."""

    def __init__(self, count: int, target: Target, arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        # The workers inherit the blocked Ctrl-C, because the parent answers it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(count):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_enter, args=(target, rank, theirs, arguments), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        except BaseException:
            self.kill()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def messages(self, pause_s: float | None = None) -> Iterator[tuple[int, object] | None]:
        """What the workers send, as ``(rank, message)``, until all have ended. Raises when one fails.

        If ``pause_s`` is given, it yields None whenever nothing has come for that long.
        """
        open_ranks = {connection: rank for rank, connection in enumerate(self._connections)}
        while open_ranks:
            ready = [open_ranks[c] for c in wait(list(open_ranks), pause_s) if isinstance(c, Connection)]
            # When one rank dies the others complain about it, so look for dead ones before listening.
            self._raise_if_killed()
            if not ready:
                yield None
            for rank in ready:
                try:
                    message = self._connections[rank].recv()
                except EOFError:
                    del open_ranks[self._connections[rank]]
                    self._raise_unless_finished(rank)
                    continue
                if isinstance(message, _Failure):
                    self._raise_if_killed()
                    raise _as_error(rank, message)
                yield rank, message

    def kill(self) -> None:
        """End all workers now, also those that are stopped, and wait until they have ended."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _raise_if_killed(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None and process.exitcode < 0:
                raise PeerError(
                    f"the worker of rank {rank} was killed by {signal.Signals(-process.exitcode).name}"
                )

    def _raise_unless_finished(self, rank: int) -> None:
        process = self._processes[rank]
        process.join()
        self._raise_if_killed()
        if process.exitcode != 0:
            raise PeerError(f"the worker of rank {rank} ended with exit code {process.exitcode}")


def _as_error(rank: int, failure: _Failure) -> TailcutError:
    if failure.expected:
        return PeerError(f"rank {rank}: {failure.text}")
    return PeerError(f"the worker of rank {rank} failed\n{failure.text}")


def _enter(target: Target, rank: int, connection: Connection, arguments: tuple[Any, ...]) -> None:
    # The kernel does it, so it also works when the parent is killed or this worker is stopped.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        return
    try:
        target(rank, connection.send, *arguments)
    except TailcutError as error:
        connection.send(_Failure(str(error), expected=True))
    except Exception:
        connection.send(_Failure(traceback.format_exc(), expected=False))
