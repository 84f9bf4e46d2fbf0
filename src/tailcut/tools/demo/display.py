"""The live display: one row for each side that redraws itself on a terminal, and plain lines elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TextIO

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
NAMES = {"tailcut": "tailcut", "gloo": "Gloo"}


@dataclass(frozen=True)
class Glance:
    """One side at one moment, as rank 0 sees it."""

    side: str
    step: int
    steps: int
    loss: float
    last_s: float
    """How long the last step took."""
    state: str


class Display(Protocol):
    """It is shown a side several times per second."""

    def show(self, glance: Glance) -> None: ...


class Screen:
    """A table that is redrawn in its place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rows: dict[str, str] = {}
        self._height = 0

    def show(self, glance: Glance) -> None:
        text = _row(glance)
        self._rows[glance.side] = f"{_BOLD}{text}{_PLAIN}" if "FROZEN" in glance.state else text
        lines = [f"{'':<10}{'step':>9}{'loss':>9}{'last step':>13}", *self._rows.values()]
        up = f"\x1b[{self._height}A" if self._height else ""
        self._stream.write(up + "".join(f"\x1b[K{line}\n" for line in lines))
        self._stream.flush()
        self._height = len(lines)


class Log:
    """For pipes and files: a line when the state of a side changes, and every hundred steps."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._before = ("", "", 0)

    def show(self, glance: Glance) -> None:
        now = (glance.side, glance.state, glance.step // 100)
        if now != self._before:
            print(_row(glance), file=self._stream, flush=True)
        self._before = now


def _row(glance: Glance) -> str:
    figures = f"{glance.loss:>9.4f}{1e3 * glance.last_s:>10.1f} ms" if glance.step else f"{'':>22}"
    return f"{NAMES[glance.side]:<10}{glance.step:>5}/{glance.steps}{figures}   {glance.state}"
