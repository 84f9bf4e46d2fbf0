"""Training scripts in real processes: under torchrun, or each rank started by hand where one is to die.

Scripts live in tests/training. Everything started here is gone when its call or its context ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TORCHRUN = Path(sys.executable).with_name("torchrun")
LIMIT_S = 120
"""Only a hang takes longer."""


@dataclass(frozen=True)
class Run:
    """What a torchrun left behind."""

    code: int
    results: list[dict[str, Any]]
    """Of each rank: what its script gave to ``report``, nothing if it did not come so far."""
    err: str

    def of(self, case: str) -> list[Any]:
        """What each rank reports of one case."""
        return [rank[case] for rank in self.results]


def torchrun(
    ranks: int,
    script: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    launcher: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
) -> Run:
    """Run tests/training/``script`` on ``ranks`` ranks in a directory of its own; ``frameworks.script`` is
    one of tests/frameworks."""
    with tempfile.TemporaryDirectory() as directory:
        command = [str(TORCHRUN), "--standalone", f"--nproc-per-node={ranks}", *launcher, "-m"]
        with _started(
            [*command, _module(script), *arguments], directory, env or {}, subprocess.DEVNULL, limit_s
        ) as process:
            _, err = process.communicate()
        files = [Path(directory, f"{rank}.json") for rank in range(ranks)]
        results = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        return Run(process.returncode, results, err)


class Worker:
    """One rank in a process of its own. Speaks and listens in lines of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def hear(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the worker ended with {self._process.wait()}:\n{self.end()[1]}")
        return json.loads(line)

    def say(self, word: str) -> None:
        assert self._process.stdin
        print(word, file=self._process.stdin, flush=True)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the exit code and what it wrote to stderr."""
        _, err = self._process.communicate()
        return self._process.returncode, err

    def left_behind(self) -> list[int]:
        """Processes that it started and that still run; it is the first of a session."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                session = (entry / "stat").read_text().rpartition(")")[2].split()[3]
                found += [int(entry.name)] * (session == str(self._process.pid))
        return found


@contextlib.contextmanager
def workers(
    directory: Path,
    ranks: int,
    script: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    hosts: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
) -> Iterator[list[Worker]]:
    """``ranks`` ranks without torchrun, which would end them all when one dies.

    With ``hosts``, each in a network namespace of its own.
    """
    inside = [["ip", "netns", "exec", host] for host in hosts] or [[]] * ranks
    with contextlib.ExitStack() as stack:
        yield [
            Worker(
                stack.enter_context(
                    _started(
                        [*inside[rank], sys.executable, "-m", _module(script), *arguments],
                        str(directory),
                        {"RANK": str(rank), "WORLD_SIZE": str(ranks), **(env or {})},
                        subprocess.PIPE,
                        limit_s,
                    )
                )
            )
            for rank in range(ranks)
        ]


def _module(script: str) -> str:
    return f"tests.{script}" if "." in script else f"tests.training.{script}"


@contextlib.contextmanager
def _started(
    command: list[str], directory: str, env: dict[str, str], stdin: int, limit_s: float = LIMIT_S
) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TAILCUT_")}
    ours = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Who tests a tree that is not installed has it in the path, and so should its workers.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "ONEDNN_MAX_CPU_ISA": "AVX2",  # on some virtual machines torch's bfloat16 kernels end in SIGILL
    }
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=inherited | ours | env,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(limit_s, _kill_tree, [process])  # also ends a read from it
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        _kill_tree(process)
        process.communicate()


def _kill_tree(process: subprocess.Popen[str]) -> None:
    """Killing torchrun alone would leave its workers running."""
    if process.poll() is None:
        for child in _descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _descendants(process: int) -> list[int]:
    found = [process]
    for parent in found:  # grows while it is walked
        with contextlib.suppress(FileNotFoundError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found
