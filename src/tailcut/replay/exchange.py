"""How the ranks of a replay hand each other contributions and means: whole, in order of need, once.

Every blob has one reader. Nothing is lost here, and nothing is late: the script says what would have been. A
rank that ends says why, so that nobody waits for it.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Protocol

POLL_S = 0.0005
PULSE_S = 0.1
"""So often a rank that waits looks whether the other one is still there."""


class Exchange(Protocol):
    """Blobs by name."""

    def put(self, name: str, blob: bytes) -> None: ...

    def has(self, name: str) -> bool: ...

    def get(self, name: str, source: int, limit_s: float) -> bytes | None:
        """Take a blob of a rank, which is gone then; None if the rank has ended without it, or if it does not
        come within the limit."""
        ...

    def leave(self, rank: int, reason: str) -> None:
        """This rank puts nothing more. The first reason counts."""
        ...

    def why_left(self, rank: int) -> str | None:
        """Why a rank has ended; None if it has not."""
        ...


class MemoryExchange:
    """Among threads."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._left: dict[int, str] = {}
        self._changed = threading.Condition()

    def put(self, name: str, blob: bytes) -> None:
        with self._changed:
            self._blobs[name] = blob
            self._changed.notify_all()

    def has(self, name: str) -> bool:
        return name in self._blobs

    def get(self, name: str, source: int, limit_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: name in self._blobs or source in self._left, limit_s)
            return self._blobs.pop(name, None)

    def leave(self, rank: int, reason: str) -> None:
        with self._changed:
            self._left.setdefault(rank, reason)
            self._changed.notify_all()

    def why_left(self, rank: int) -> str | None:
        return self._left.get(rank)


class FileExchange:
    """Among processes of one machine. The last one to leave removes the directory."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory = directory
        self._ranks = ranks
        directory.mkdir(parents=True, exist_ok=True)
        self._write(f"here.{rank}", str(os.getpid()).encode())

    def put(self, name: str, blob: bytes) -> None:
        self._write(name, blob)

    def _write(self, name: str, blob: bytes) -> None:
        partial = self._directory / f"{name}.part"
        partial.write_bytes(blob)
        os.replace(partial, self._directory / name)

    def has(self, name: str) -> bool:
        return (self._directory / name).exists()

    def get(self, name: str, source: int, limit_s: float) -> bytes | None:
        path, until_s, pulse_s = self._directory / name, time.monotonic() + limit_s, time.monotonic()
        while (blob := self._read(path)) is None:
            now_s = time.monotonic()
            if now_s >= until_s:
                return None
            if now_s >= pulse_s:
                pulse_s = now_s + PULSE_S
                if self.why_left(source) is not None:  # its last word may have come since we looked
                    blob = self._read(path)
                    break
            time.sleep(POLL_S)
        path.unlink(missing_ok=True)
        return blob

    @staticmethod
    def _read(path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def leave(self, rank: int, reason: str) -> None:
        if not self._directory.is_dir() or (self._directory / f"left.{rank}").exists():
            return
        self._write(f"left.{rank}", reason.encode())
        if all(self.why_left(other) is not None for other in range(self._ranks)):
            shutil.rmtree(self._directory, ignore_errors=True)

    def why_left(self, rank: int) -> str | None:
        if (reason := self._read(self._directory / f"left.{rank}")) is not None:
            return reason.decode()
        process = self._read(self._directory / f"here.{rank}")
        if process is None or _lives(int(process)):
            return None
        return "its process was killed"


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
