"""The live display: a picture that is redrawn in its place on a terminal, and lines of news elsewhere."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from typing import Protocol, TextIO

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
_STYLE = re.compile("(\x1b\\[[0-9;]*m)")


class Display(Protocol):
    """It is shown the same several times per second."""

    def show(self, picture: Sequence[str], news: str | None = None) -> None:
        """``news`` is what a log says now; None says nothing."""


class Screen:
    """Shows the picture. What is wider or higher than the terminal would break it, so it is cut."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._height = 0

    def show(self, picture: Sequence[str], news: str | None = None) -> None:
        width, height = (size - 1 for size in shutil.get_terminal_size())
        picture = picture[-height:]
        up = f"\x1b[{self._height}A" if self._height else ""
        self._stream.write(up + "".join(f"\x1b[K{cut(line, width)}\n" for line in picture) + "\x1b[J")
        self._stream.flush()
        self._height = len(picture)


class Log:
    """For pipes and files: the news."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, picture: Sequence[str], news: str | None = None) -> None:
        if news is not None:
            print(news, file=self._stream, flush=True)


def display_on(stream: TextIO) -> Display:
    return Screen(stream) if stream.isatty() else Log(stream)


def cut(line: str, width: int) -> str:
    """The line's first ``width`` characters. Styles take no room."""
    kept = ""
    for part in _STYLE.split(line):
        if not _STYLE.fullmatch(part):
            part = part[: max(width, 0)]
            width -= len(part)
        kept += part
    return kept
