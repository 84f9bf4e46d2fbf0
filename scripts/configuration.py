#!/usr/bin/env python3
"""Writes docs/configuration.md from the fields of tailcut.Config and their docstrings: make docs."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from tailcut import Config

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Generated from src/tailcut/config.py by `make docs`. -->

A field comes from the argument, else from the environment variable `TAILCUT_<FIELD>`, else from the default.
`attach` and `Group` also take every field as a keyword. It comes before the field of a `Config` beside it:

    attach(ddp, deadline_s=2.5)
    Group(rank, world_size, store, Config(codec="raw"), lanes=2)

Fields marked **alike** must have one value on all ranks. If they differ, every rank gets a `ConfigError` that
says which rank has which value. `TAILCUT_DISABLE=1` is not a field: it leaves everything to DDP and Gloo.

| field | default | allowed | what it does |
|---|---|---|---|
"""


def page() -> str:
    docs = docstrings()
    return HEAD + "".join(f"{row(entry, docs[entry.name])}\n" for entry in fields(Config))


def docstrings() -> dict[str, str]:
    """By field: the string that stands below it."""
    (definition,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[statement.target.id] = " ".join(text.split())
    return found


def row(entry: Field[Any], text: str) -> str:
    text = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text).replace("``", "`")
    if entry.metadata["agreed"]:
        text = f"**alike** {text}"
    default = entry.metadata["default"]
    shown = "" if callable(default) else f"`{default!r}`"
    return f"| `{entry.name}` | {shown} | {entry.metadata['allowed'].says} | {text} |"


if __name__ == "__main__":
    PAGE.write_text(page())
