"""The agent that makes programs hang: it traces the main thread of every process, and no other thread.

main_threads.py tells it what to do. When it ends, in whatever way, the kernel lets all of them go on.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tailcut.tools.testbed.main_threads import DONE, READY

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207  # linux/ptrace.h
WALL = 0x4000_0000  # linux/wait.h: whatever kind of child it is
LOOK_S = 0.05


def _ptrace(request: int, pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, pid, None, None) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _stop(pid: int) -> bool:
    """Stop the main thread of a process. Returns False if the process has ended."""
    try:
        _ptrace(PTRACE_SEIZE, pid)
        _ptrace(PTRACE_INTERRUPT, pid)
        os.waitpid(pid, WALL)
    except (ProcessLookupError, ChildProcessError):
        return False
    return True


def _resume(pid: int) -> None:
    with suppress(ProcessLookupError):
        _ptrace(PTRACE_DETACH, pid)


def _members(groups: Sequence[int]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) in groups:
                found.append(int(entry.name))
    return found


def _reap() -> None:
    """Let parents see the death of their children, which they do only after the tracer has."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, WALL | os.WNOHANG)[0]:
            pass


def _rehearse() -> None:
    """Stop a child once. A machine that forbids this says so before a run and not in the middle of it."""
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        _stop(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, WALL)


def main() -> None:
    _rehearse()
    print(READY, flush=True)
    stopped: dict[str, list[int]] = {}
    while True:
        if select.select([sys.stdin], [], [], LOOK_S if stopped else None)[0]:
            words = sys.stdin.readline().split()
            if not words:
                return
            action, host, *groups = words
            if action == "hang":
                held = stopped.setdefault(host, [])
                members = _members([int(group) for group in groups])
                held += [pid for pid in members if pid not in held and _stop(pid)]
            else:
                for pid in stopped.pop(host, []):
                    _resume(pid)
            print(DONE, flush=True)
        _reap()


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(error.strerror, flush=True)
