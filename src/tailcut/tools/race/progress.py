"""What a rank says while it runs: lines of JSON at the end of RANK.jsonl, and at the end RANK.json.

Lines have ``step`` and ``at_s``, the rank's own time since its first timed step. A step has ``step_s``,
``loss`` and with tailcut ``ops_s``. An evaluation, by rank 0 only, has ``figure`` and with tailcut ``spent``
(ε), ``budget`` (its limit) and ``lost_frac``. The first line of rank 0 has the workload's ``facts`` instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]
BEGUN = "begun"
"""The file that rank 0 makes when the timed steps begin."""


def stream_of(rank: int, directory: Path) -> Path:
    return directory / f"{rank}.jsonl"


class ProgressWriter:
    """Appends lines, each at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def say(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


class ProgressReader:
    """Reads the lines that have come since the last look. A line that is not whole yet waits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def look(self) -> list[Line]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]
