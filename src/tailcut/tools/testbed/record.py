"""Records which testbeds exist. Each has a directory that is named for its owning process, so that those of
dead owners are found.

It owns names and the removal of everything that has them. It knows nothing of what a testbed is for.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tailcut.errors import ConfigError
from tailcut.tools.testbed import system

MARK = "TAILCUT_TESTBED"
"""The variable with the testbed's id in the environment of all its processes."""


def state_directory() -> Path:
    """Return where records are: root's in a place of the machine, anybody else's in a place of their own."""
    if os.geteuid() == 0 and not system.in_user_namespace():
        return Path("/run/tailcut")
    return Path(f"/tmp/tailcut-{system.outer_uid()}")


@dataclass(frozen=True)
class Record:
    """One testbed's id (owner's pid, start time in ticks, and a number) and what follows from it."""

    id: str
    directory: Path

    @classmethod
    def create(cls) -> Record:
        """Claim an id for this process, before anything that bears it exists."""
        root, number = state_directory(), 0
        while True:
            name = f"{os.getpid()}-{_started_ticks(os.getpid()):x}-{number}"
            try:
                root.mkdir(mode=0o700, exist_ok=True)
                if root.stat().st_uid != os.geteuid():
                    raise ConfigError(f"{root} belongs to somebody else: remove it")
                (root / name).mkdir()
            except FileExistsError:
                number += 1
            except FileNotFoundError:  # somebody else's last testbed has just gone, and the root with it
                continue
            else:
                return cls(name, root / name)

    @property
    def owner_pid(self) -> int:
        return int(self.id.split("-")[0])

    @property
    def owner_lives(self) -> bool:
        pid, ticks, _ = self.id.split("-")
        return _started_ticks(int(pid)) == int(ticks, 16)

    @property
    def switch(self) -> str:
        return f"tailcut-{self.id}-switch"

    @property
    def background(self) -> str:
        """The namespace that other people's traffic comes from."""
        return f"tailcut-{self.id}-background"

    def neighbour(self, number: int) -> str:
        """The namespace of the neighbour behind the port of a host."""
        return f"tailcut-{self.id}-n{number}"

    def host(self, number: int) -> str:
        return f"tailcut-{self.id}-h{number}"

    @cached_property
    def bpf_directory(self) -> Path:
        return self.directory / "bpf"

    def write_status(self, status: dict[str, Any]) -> None:
        part = self.directory / "status.part"
        part.write_text(json.dumps(status))
        part.rename(self.directory / "status.json")

    def read_status(self) -> dict[str, Any]:
        """Return the status. It is empty while the testbed comes up or goes down."""
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            status: dict[str, Any] = json.loads((self.directory / "status.json").read_text())
            return status
        return {}

    def remove(self) -> None:
        """End the processes, then remove namespaces, mounts and the directory, as far as they exist."""
        namespaces = self._namespaces()
        _kill(self.id, namespaces)
        system.batch("ip", [f"netns delete {name}" for name in namespaces], check=False)
        if os.path.ismount(self.bpf_directory):
            system.run("umount", "--lazy", str(self.bpf_directory), check=False)
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.directory.parent.rmdir()  # unless there are others

    def _namespaces(self) -> list[str]:
        return [path.name for path in Path("/run/netns").glob(f"tailcut-{self.id}-*")]


def records() -> list[Record]:
    """Return all testbeds of this user, dead ones too."""
    found = sorted(state_directory().glob("[0-9]*-[0-9a-f]*-[0-9]*"))
    return [Record(path.name, path) for path in found]


def remove_leftovers() -> list[str]:
    """Remove every testbed whose owner was killed, and return their ids."""
    dead = [record for record in records() if not record.owner_lives]
    for record in dead:
        record.remove()
    return [record.id for record in dead]


def _started_ticks(pid: int) -> int | None:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])


def _kill(testbed: str, namespaces: list[str]) -> None:
    """Kill all other processes of a testbed, by their mark or because they are inside, until none is left."""
    inside = set()
    for name in namespaces:
        with contextlib.suppress(FileNotFoundError):
            inside.add(os.stat(f"/run/netns/{name}").st_ino)
    mark = f"{MARK}={testbed}".encode()
    while found := [pid for pid in _other_pids() if _belongs(pid, mark, inside)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        time.sleep(0.001)


def _other_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid())]


def _belongs(pid: int, mark: bytes, inside: set[int]) -> bool:
    try:
        if os.stat(f"/proc/{pid}/ns/net").st_ino in inside:
            return True
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return False
