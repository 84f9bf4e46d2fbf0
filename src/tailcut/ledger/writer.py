"""What a rank writes into its ledger, and where (docs/ledger.md).

Owns the name of the file and what the user is told. Native code makes records of ops and writes them, in a
thread of its own (native/drivers/ledger_file.hpp).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailcut import _native, notices
from tailcut.errors import ConfigError
from tailcut.ledger.records import Kind, json_payload, op_head, start_payload
from tailcut.report import Verdict

MOST_WAITING_BYTES = 16 << 20
"""Records that wait for the disk. At 1 KB an op that is some minutes of training."""

CLOSE_LIMIT_S = 5.0
"""How long closing a group waits for the disk."""

SUFFIX = ".ledger"

OPEN_SUFFIX = ".open"
"""Of the file with the ops that are under way, which is there as long as the group is open."""

OPEN_BYTES = 1 << 20
"""Of that file: the latest hundred ops or so."""


def file_name(group: str, tag: int, rank: int) -> str:
    """The name of a rank's file. ``tag`` is that of the group, so that no two runs share one."""
    return f"{run_name(group)}{tag:012x}.rank{rank:04d}{SUFFIX}"


def run_name(group: str) -> str:
    """What the files of all runs of a group of this name begin with."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", group) + "."


class NoLedger:
    """A group that keeps none."""

    keeps = False

    def op(self, lane: int, native: _native.OpReport, verdicts: Sequence[Verdict]) -> None:
        pass

    def keep_with(self, lanes: Sequence[_native.UdpLane]) -> None:
        pass

    def note(self, event: str, **values: object) -> None:
        pass

    def take_alarms(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


NO_LEDGER = NoLedger()


class LedgerWriter(NoLedger):
    """One rank of one group. ``about`` is written first and says what the group is."""

    keeps = True

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"ledger={str(path.parent)!r} cannot be written ({error.strerror}); name another directory, "
                "or leave it empty to keep no ledger"
            ) from error
        self.file = _native.LedgerFile(descriptor, MOST_WAITING_BYTES)
        self._told = False
        self._open = path.with_suffix(OPEN_SUFFIX)
        for _ in range(2):  # without it nothing can be read, so one that is damaged must not be the only one
            self.file.append(Kind.START, start_payload(about))

    def keep_with(self, lanes: Sequence[_native.UdpLane]) -> None:
        """The engines of these lanes, which have not started, record what Python does not see: ops that this
        rank has not entered, and what would be lost if it were killed."""
        for index, lane in enumerate(lanes):
            head = op_head(index, ())
            descriptor = self._open_descriptor() if len(lanes) == 1 else -1  # others cannot be replayed
            try:
                lane.keep_ledger(self.file, descriptor, OPEN_BYTES, head)
            except RuntimeError as error:  # std::system_error: the disk has no room, and will tell the thread
                lane.keep_ledger(self.file, -1, 0, head)
                notices.warn(
                    f"tailcut: {self._open} cannot be kept ({error}): if this rank is killed, the replay of "
                    "the run will end at the op that it was in"
                )

    def _open_descriptor(self) -> int:
        try:
            return os.open(self._open, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{str(self._open)!r} cannot be written ({error.strerror})") from error

    def op(self, lane: int, native: _native.OpReport, verdicts: Sequence[Verdict]) -> None:
        """An op has ended. Costs some microseconds."""
        self.file.append_op(op_head(lane, verdicts), native)

    def note(self, event: str, **values: object) -> None:
        """Something has happened beside the ops."""
        self.file.append(Kind.NOTE, json_payload({"event": event, "at_s": time.monotonic(), **values}))

    def take_alarms(self) -> list[str]:
        """A warning, once, if records were left out."""
        if self._told or not (problem := self.file.problem):
            return []
        self._told = True
        return [
            f"tailcut: the ledger {self._path} has gaps ({problem}): training goes on, but such a run "
            "cannot be replayed. Free or change the disk"
        ]

    def close(self) -> None:
        """Write what waits, but not longer than a few seconds."""
        self.file.append(Kind.END, json_payload({"at_s": time.monotonic()}))
        if self.file.close(int(1e9 * CLOSE_LIMIT_S)):
            self._open.unlink(missing_ok=True)
