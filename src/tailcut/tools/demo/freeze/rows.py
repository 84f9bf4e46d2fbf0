"""What the display says of the freeze: one row for each side."""

from __future__ import annotations

from dataclasses import dataclass

from tailcut.tools.demo.display import BOLD, PLAIN, Display

NAMES = {"tailcut": "tailcut", "gloo": "Gloo"}
LOGGED_STEPS = 100


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


class Rows:
    """The latest glance of each side. It is news when a state changes, and every so many steps."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._rows: dict[str, str] = {}
        self._before = ("", "", 0)

    def show(self, glance: Glance) -> None:
        text = _row(glance)
        self._rows[glance.side] = f"{BOLD}{text}{PLAIN}" if "FROZEN" in glance.state else text
        now = (glance.side, glance.state, glance.step // LOGGED_STEPS)
        head = f"{'':<10}{'step':>9}{'loss':>9}{'last step':>13}"
        self._display.show([head, *self._rows.values()], text if now != self._before else None)
        self._before = now


def _row(glance: Glance) -> str:
    figures = f"{glance.loss:>9.4f}{1e3 * glance.last_s:>10.1f} ms" if glance.step else f"{'':>22}"
    return f"{NAMES[glance.side]:<10}{glance.step:>5}/{glance.steps}{figures}   {glance.state}"
