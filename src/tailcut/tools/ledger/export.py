"""Writes the tables of a ledger for other programs: CSV, JSON (one object a line) or Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tailcut import ConfigError, Ledger
from tailcut.tools.ledger.tables import TABLES, Row


def export(ledger: Ledger, directory: Path, form: str, tables: Sequence[str] = tuple(TABLES)) -> list[Path]:
    """Write these tables. A table without rows has a file with its columns only where the form has them."""
    write = _FORMS[form]
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in tables:
        path = directory / f"{name}.{form}"
        write(path, list(TABLES[name](ledger)))
        paths.append(path)
    return paths


def _csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]) if rows else [])
        table.writeheader()
        table.writerows(rows)


def _json(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _parquet(path: Path, rows: list[Row]) -> None:
    arrow = _pyarrow()
    arrow.parquet.write_table(arrow.Table.from_pylist(rows), path)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow: pip install tailcut[parquet], or take --format csv"
        ) from None
    return pyarrow


_FORMS: dict[str, Callable[[Path, list[Row]], None]] = {"csv": _csv, "json": _json, "parquet": _parquet}
FORMS = tuple(_FORMS)
