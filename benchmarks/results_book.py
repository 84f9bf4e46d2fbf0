"""The JSON file of time_to_accuracy.py: one machine, one set of conditions, cells by their address."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tailcut import ConfigError

Stored = dict[str, Any]
Address = tuple[Any, ...]


class Book:
    """Written after every cell, so that an interruption loses only the cell that was running."""

    ADDRESS = ("scenario", "tcp", "seed", "side")

    def __init__(self, path: Path, document: Stored) -> None:
        self._path = path
        self._document = document

    @classmethod
    def open(cls, path: Path, conditions: Stored, machine: Stored) -> Book:
        """Continue a file, or begin one."""
        if not path.exists():
            book = cls(path, {"conditions": conditions, "machine": machine, "cells": []})
            book._write()  # otherwise a mistake in its name would show only after the first cell
            return book
        document = cls.read(path)
        for what, known, now in (
            ("conditions", document["conditions"], conditions),
            ("machine", document["machine"], machine),
        ):
            other = [name for name in {**known, **now} if known.get(name) != now.get(name)]
            if other:
                differing = ", ".join(f"{name} {known.get(name)}, not {now.get(name)}" for name in other)
                raise ConfigError(f"{path} has cells of another {what} ({differing}): name another --json")
        return cls(path, document)

    @staticmethod
    def read(path: Path) -> Stored:
        try:
            document: Stored = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        return document

    @property
    def cells(self) -> list[Stored]:
        return list(self._document["cells"])

    def __contains__(self, address: object) -> bool:
        return any(self._address(cell) == address for cell in self._document["cells"])

    def add(self, cell: Stored) -> None:
        self._document["cells"].append(cell)
        self._write()

    def forget(self, addresses: Collection[Address]) -> None:
        kept = [cell for cell in self._document["cells"] if self._address(cell) not in addresses]
        self._document["cells"] = kept
        self._write()

    def _address(self, cell: Stored) -> Address:
        return tuple(cell[name] for name in self.ADDRESS)

    def _write(self) -> None:
        head = {name: value for name, value in self._document.items() if name != "cells"}
        lines = ",\n".join(json.dumps(cell) for cell in self._document["cells"])
        part = self._path.with_suffix(".part")
        part.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n{lines}\n]}}\n')
        os.replace(part, self._path)
