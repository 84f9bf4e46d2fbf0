"""The live display: a table that redraws itself on a terminal, a line per change elsewhere."""

from __future__ import annotations

from typing import Protocol, TextIO

from tailcut.demo.worker import Entries

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


class Display(Protocol):
    """Shown the board several times per second."""

    def show(self, entries: Entries, states: list[str]) -> None: ...


class Screen:
    """A table in place."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._height = 0

    def show(self, entries: Entries, states: list[str]) -> None:
        rows = ["rank       ops     last op     lost   state"]
        for rank, (entry, state) in enumerate(zip(entries, states, strict=True)):
            text = (
                f"{rank:>4}{entry['ops']:>10}{1e3 * entry['last_s']:>9.1f} ms{entry['lost']:>9.2%}   {state}"
            )
            rows.append(text if state == "running" else f"{_BOLD}{text}{_PLAIN}")
        up = f"\x1b[{self._height}A" if self._height else ""
        self._stream.write(up + "".join(f"\x1b[K{row}\n" for row in rows))
        self._stream.flush()
        self._height = len(rows)


class Log:
    """A line when a rank's state changes, for pipes and files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._states: list[str] = []

    def show(self, entries: Entries, states: list[str]) -> None:
        before = self._states or [""] * len(states)
        for rank, (old, new) in enumerate(zip(before, states, strict=True)):
            if old != new:
                print(f"rank {rank}: {new} at op {entries[rank]['ops']}", file=self._stream, flush=True)
        self._states = states
