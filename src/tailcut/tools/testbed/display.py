"""Shows a run: each line has its host in front, and a status line below them redraws itself."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any, TextIO

from tailcut.tools.testbed.counters import PortCounters
from tailcut.tools.testbed.faults import Event
from tailcut.tools.testbed.testbed import Testbed


class Screen:
    """Shows the output of all hosts. On a terminal a live status line stays at the bottom."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._live = err.isatty()
        self._before: tuple[float, list[PortCounters]] | None = None
        self._shown: list[str] = []

    def line(self, host: int, text: str, to_stderr: bool) -> None:
        self.say(f"[h{host}] {text}", self._err if to_stderr else self._out)

    def say(self, text: str, stream: TextIO | None = None) -> None:
        self._clear()
        print(text, file=stream or self._err, flush=True)
        self._draw()

    def fault(self, event: Event) -> None:
        self.say(f"[testbed] {event.at_s:.2f} s: {event.action}, host {event.host}")

    def glance(self, testbed: Testbed, now_s: float) -> None:
        testbed.publish_status()
        counters = testbed.counters()
        if self._live and self._before is not None:
            before_s, before = self._before
            self._clear()
            columns = shutil.get_terminal_size().columns
            self._shown = status_rows(before, counters, now_s - before_s, columns)
            self._draw()
        self._before = now_s, counters

    def close(self) -> None:
        """Remove the status line."""
        self._clear()
        self._shown = []

    def _clear(self) -> None:
        if self._shown:
            self._err.write("\r\x1b[K" + "\x1b[1A\x1b[K" * (len(self._shown) - 1))
            self._err.flush()

    def _draw(self) -> None:
        if self._shown:
            self._err.write("\n".join(self._shown))
            self._err.flush()


def status_rows(
    before: Sequence[PortCounters], after: Sequence[PortCounters], elapsed_s: float, columns: int
) -> list[str]:
    """Return each port's rate, queue, trimmed and dropped packets, in as few rows as the terminal allows."""
    rows: list[str] = []
    for old, new in zip(before, after, strict=True):
        rate_mbit_s = 8e-6 * (new.bytes - old.bytes) / max(elapsed_s, 1e-9)
        text = f"{new.port} {rate_mbit_s:.0f}M q{new.backlog_bytes / 1e3:.0f}k t{new.trimmed} d{new.dropped}"
        if rows and len(rows[-1]) + 3 + len(text) < columns:
            rows[-1] += f" | {text}"
        else:
            rows.append(text[: columns - 1])
    return rows


def describe_status(status: dict[str, Any]) -> str:
    """Describe one testbed as ``status`` shows it."""
    lines = [f"{status['id']}: {status['scenario']}, {len(status['hosts'])} hosts, {status['switch']}"]
    lines += [f"  h{host['rank']} {host['address']}: {host['enter']}" for host in status["hosts"]]
    table = port_table([PortCounters(**port) for port in status["ports"]])
    return "\n".join([*lines, *(f"  {line}" for line in table.splitlines())])


def port_table(counters: Sequence[PortCounters]) -> str:
    """Return what every port has done, for the end of a run."""
    head = ("port", "packets", "MB", "queue kB", "max kB", "trimmed", "dropped", "full", "random", "bursty")
    rows: list[tuple[str, ...]] = [head]
    rows += [
        (
            c.port,
            str(c.packets),
            f"{c.bytes / 1e6:.2f}",
            f"{c.backlog_bytes / 1e3:.0f}",
            f"{c.max_backlog_bytes / 1e3:.0f}",
            *map(str, (c.trimmed, c.dropped, c.dropped_full, c.dropped_at_random, c.dropped_in_bursts)),
        )
        for c in counters
    ]
    return "\n".join(f"{row[0]:<6}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows)
