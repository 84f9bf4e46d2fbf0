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

from tailcut import _native
from tailcut.errors import ConfigError
from tailcut.ledger.records import Kind, json_payload, op_head, start_payload
from tailcut.report import Verdict

MOST_WAITING_BYTES = 16 << 20
"""Records that wait for the disk. At 1 KB an op that is some minutes of training."""

CLOSE_LIMIT_S = 5.0
"""How long closing a group waits for the disk."""

SUFFIX = ".ledger"


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
        for _ in range(2):  # without it nothing can be read, so one that is damaged must not be the only one
            self.file.append(Kind.START, start_payload(about))

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
        self.file.close(int(1e9 * CLOSE_LIMIT_S))
