"""Follows the runs of a demo while they last, and draws them with characters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tailcut.tools.demo.display import BOLD, PLAIN, Display
from tailcut.tools.demo.results import NAMES
from tailcut.tools.demo.verdict import figure_text
from tailcut.tools.race import ProgressReader, stream_of
from tailcut.tools.race.progress import Line

REDRAW_S = 0.5
NEWS_S = 5.0
WIDTH, HEIGHT = 60, 10
SYMBOLS = {"gloo": "o", "fp16": "x", "tailcut": "#"}
STYLES = {"gloo": "\x1b[34m", "fp16": "\x1b[33m", "tailcut": "\x1b[1;36m"}
BARS = " ▁▂▃▄▅▆▇█"
BINS_S = np.geomspace(0.02, 5.0, 17)
"""The limits of the histogram. What is outside is in the first or in the last."""


@dataclass
class Track:
    """What rank 0 of a run has said so far."""

    side: str
    seed: int
    steps_s: list[float] = field(default_factory=list)
    evaluations: list[Line] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    at_s: float = 0.0
    state: str = "starting"

    def add(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if "facts" in line:
                self.facts, self.state = line["facts"], "training"
                continue
            self.at_s = line["at_s"]
            if "figure" in line:
                self.evaluations.append(line)
            if "step_s" in line:
                self.steps_s.append(line["step_s"])

    def words(self) -> list[str]:
        """Time and steps, figure, step times, budget."""
        if not self.steps_s:
            return [self.state]
        p50_s, p99_s = np.quantile(self.steps_s, (0.5, 0.99), method="inverted_cdf")
        words = [f"{self.at_s:5.1f} s", f"{len(self.steps_s):4d} steps"]
        words.append(f"p50 {1e3 * p50_s:4.0f} ms, p99 {1e3 * p99_s:4.0f} ms")
        if self.evaluations:
            last = self.evaluations[-1]
            words.insert(2, f"{self.facts.get('figure', 'figure')} {figure_text(last['figure'], self.facts)}")
            if "spent" in last:
                words.append(f"{100 * last['spent']:.1f} of the budget's {100 * last['budget']:.0f} % spent")
        return words


class Watch:
    """Shows all runs so far on a display."""

    def __init__(self, display: Display, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._display = display
        self._seconds = seconds
        self._clock = clock
        self._tracks: list[Track] = []
        self._reader: ProgressReader | None = None
        self._said: str | None = None
        self._redraw_at_s = self._news_at_s = 0.0

    def begin(self, side: str, seed: int, directory: Path) -> None:
        self._tracks.append(Track(side, seed))
        self._reader = ProgressReader(stream_of(0, directory))
        self._show(news=True)

    def look(self) -> None:
        """Called again and again."""
        now_s = self._clock()
        if now_s < self._redraw_at_s or self._reader is None:
            return
        self._redraw_at_s = now_s + REDRAW_S
        self._tracks[-1].add(self._reader.look())
        self._show(news=now_s >= self._news_at_s)

    def end(self, failed: str | None) -> None:
        assert self._reader
        self._tracks[-1].add(self._reader.look())
        self._tracks[-1].state = f"stopped: {failed}" if failed else "done"
        self._show(news=True)

    def _show(self, *, news: bool) -> None:
        if news:
            self._news_at_s = self._clock() + NEWS_S
        said = _news(self._tracks[-1]) if news else None
        self._display.show(picture(self._tracks, self._seconds), None if said == self._said else said)
        self._said = said or self._said


def _name(track: Track) -> str:
    return NAMES[track.side] + (f" (seed {track.seed})" if track.seed else "")


def _news(track: Track) -> str:
    words = track.words()
    state = [] if track.state in ("training", words[0]) else [track.state]
    return f"{_name(track)}: {', '.join([*words, *state])}"


def picture(tracks: Sequence[Track], seconds: float) -> list[str]:
    """Curves of the figure against time, and below them a row for each run."""
    return [*_curves(tracks, seconds), "", *_rows(tracks)]


def _curves(tracks: Sequence[Track], seconds: float) -> list[str]:
    facts = next((track.facts for track in tracks if track.facts), {})
    points = [(track, line["at_s"], line["figure"]) for track in tracks for line in track.evaluations]
    if facts.get("figure", "accuracy") == "accuracy":
        low, high = 0.0, 1.0
    else:
        figures = [figure for _, _, figure in points] or [0.0, 1.0]
        low, high = min(figures), max(figures)
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for track, at_s, figure in points:
        column = min(WIDTH - 1, int(WIDTH * at_s / seconds))
        row = HEIGHT - 1 - round((HEIGHT - 1) * (figure - low) / (high - low or 1.0))
        cells[row][column] = f"{STYLES[track.side]}{SYMBOLS[track.side]}{PLAIN}"
    labels = {0: figure_text(high, facts), HEIGHT - 1: figure_text(low, facts)}
    rows = [f"{labels.get(row, ''):>8} │{''.join(line)}" for row, line in enumerate(cells)]
    axis = f"{'':>8} └{'─' * WIDTH}"
    return [
        f"{facts.get('figure', 'accuracy')!s} against time",
        *rows,
        axis,
        f"{'0 s':>12}{f'{seconds:g} s':>{WIDTH - 2}}",
    ]


def _rows(tracks: Sequence[Track]) -> list[str]:
    rows = []
    for track in tracks:
        running = track is tracks[-1] and track.state == "training"
        mark = f"{STYLES[track.side]}{SYMBOLS[track.side]}{PLAIN}"
        name = f"{BOLD}{_name(track):<16}{PLAIN}" if running else f"{_name(track):<16}"
        rows.append(f"{mark} {name} {', '.join(track.words())}")
        if track.steps_s:
            edges = f"{1e3 * BINS_S[0]:.0f} ms to {BINS_S[-1]:g} s"
            rows.append(f"  {'':<16} step times, {edges}: |{histogram(track.steps_s)}|")
        if track.state.startswith("stopped"):
            rows.append(f"  {'':<16} {track.state}")
    return rows


def histogram(times_s: Sequence[float]) -> str:
    """One bar for each bin. A bin that is not empty has a bar that is seen."""
    counts, _ = np.histogram(np.clip(times_s, BINS_S[0], BINS_S[-1]), BINS_S)
    most = max(counts.max(), 1)
    return "".join(BARS[int(np.ceil((len(BARS) - 1) * count / most))] for count in counts)
