"""Runs one command on every host, passes on its output line by line, and ends all when one fails."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from tailcut.errors import ConfigError
from tailcut.tools.testbed.faults import Event
from tailcut.tools.testbed.testbed import Testbed

REFRESH_S = 0.5
GRACE_S = 5.0
"""When one command has failed, the others have this long to end before they are killed."""


class Audience(Protocol):
    """Hears what happens, in the thread that launched the command."""

    def line(self, host: int, text: str, to_stderr: bool) -> None: ...

    def fault(self, event: Event) -> None: ...

    def glance(self, testbed: Testbed, now_s: float) -> None:
        """Take a look. This is called about every ``REFRESH_S``."""


@dataclass(frozen=True)
class Ending:
    host: int
    code: int
    """The status as a shell would say it: 128 + the number of the signal."""
    on_purpose: bool
    """Whether the scenario killed it, or another host's failure ended it."""


@dataclass
class _Pipe:
    host: int
    to_stderr: bool
    stream: IO[bytes]
    rest: bytes = b""

    def lines(self, read: bytes) -> list[str]:
        """Return the whole lines so far. At the end of the stream, return what is left."""
        *whole, self.rest = (self.rest + read).split(b"\n") if read else (self.rest, b"")
        return [line.decode(errors="replace").rstrip("\r") for line in whole if read or line]


def run_on_all(testbed: Testbed, argv: Sequence[str], audience: Audience) -> list[Ending]:
    """Run the command on every host until all have ended. The first failure ends the others."""
    launch = _Launch(testbed, argv, audience)
    try:
        while launch.step():
            pass
    finally:
        launch.close()
    return launch.endings


class _Launch:
    def __init__(self, testbed: Testbed, argv: Sequence[str], audience: Audience) -> None:
        self._testbed = testbed
        self._audience = audience
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self.endings: list[Ending] = []
        self._kill_at_s: float | None = None
        self._refresh_at_s = 0.0
        self._faults: queue.SimpleQueue[Event] = queue.SimpleQueue()
        for host in testbed.hosts:
            pipe = subprocess.PIPE
            process = testbed.spawn(host.rank, argv, stdout=pipe, stderr=pipe)
            self._running[host.rank] = process
            for stream in (process.stdout, process.stderr):
                assert stream
                os.set_blocking(stream.fileno(), False)
                entry = _Pipe(host.rank, stream is process.stderr, stream)
                self._selector.register(stream, selectors.EVENT_READ, entry)
        testbed.begin_faults(self._faults.put)

    def step(self) -> bool:
        """Wait for output or the next refresh. Returns False when everything has ended."""
        now_s = time.monotonic()
        if now_s >= self._refresh_at_s:
            self._audience.glance(self._testbed, now_s)
            self._refresh_at_s = now_s + REFRESH_S
        # The end of a command shows as the end of its output, or at the next look.
        for key, _ in self._selector.select(min(0.05, self._refresh_at_s - now_s)):
            self._read(key.data)
        while not self._faults.empty():
            self._audience.fault(self._faults.get())
        for host, process in list(self._running.items()):
            if process.poll() is not None:
                self._ended(host, process)
        if self._kill_at_s is not None and now_s > self._kill_at_s:
            self._signal_all(signal.SIGKILL)
        return bool(self._running)

    def close(self) -> None:
        """Let go of pipes that somebody else still holds."""
        for key in list(self._selector.get_map().values()):
            key.data.stream.close()
        self._selector.close()

    def _read(self, pipe: _Pipe) -> bool:
        """Pass on what has come. Returns whether there may be more."""
        try:
            read = os.read(pipe.stream.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        for line in pipe.lines(read):
            self._audience.line(pipe.host, line, pipe.to_stderr)
        if not read:
            self._selector.unregister(pipe.stream)
            pipe.stream.close()
        return bool(read)

    def _ended(self, host: int, process: subprocess.Popen[bytes]) -> None:
        del self._running[host]
        # What it wrote is in the pipes. Its children may still hold them, and nobody waits for those.
        for key in [key for key in self._selector.get_map().values() if key.data.host == host]:
            while self._read(key.data):
                pass
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        on_purpose = self._kill_at_s is not None or host in self._testbed.killed
        self.endings.append(Ending(host, code, on_purpose))
        if code and not on_purpose:
            self._kill_at_s = time.monotonic() + GRACE_S
            self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
                os.killpg(process.pid, signal.SIGCONT)  # a frozen one, too


def exit_status(endings: Sequence[Ending]) -> int:
    """Return the status of the first command that failed for reasons of its own, or 0 if none did."""
    return next((ending.code for ending in endings if ending.code and not ending.on_purpose), 0)


def check_command(argv: Sequence[str]) -> None:
    if not argv:
        raise ConfigError("no command to run: tailcut testbed run SCENARIO -- COMMAND [ARGUMENT...]")
