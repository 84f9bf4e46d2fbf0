"""What a rank says while it runs: lines of JSON at the end of a file, one file for each rank.

Every line has ``step`` and ``at_s``, which is the rank's own time since its first timed step. A step has
``step_s`` and ``loss`` too, and with tailcut ``ops_s``. An evaluation, which only rank 0 does, has
``figure``, and with tailcut ``spent`` (ε) and ``lost_frac``. The first line of rank 0 has the workload's
``facts`` instead. At the end RANK.json has ``parameters`` (a fingerprint), rank 0's has ``figure``, and with
tailcut there are ``stats``, ``config`` and ``links``: by source, what was to come to this rank and what was
late.
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
