"""What an epoch is, and how far ahead one must begin: values of the agreement in epochs.py."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Epoch:
    """An agreement on the owners."""

    number: int
    first_seqs: tuple[int, ...]
    """By lane: the op that it begins with."""
    members: tuple[int, ...]
    """The ranks that are alive, in order."""
    weights: tuple[int, ...]
    """By rank: how much it owns, relative to the others."""
    speeds: tuple[float, ...]
    """By rank: the rate of its port, relative to the others'."""

    def text(self) -> str:
        return json.dumps(vars(self))

    @staticmethod
    def parse(text: bytes) -> Epoch:
        values = json.loads(text)
        names = ("first_seqs", "members", "weights", "speeds")
        return Epoch(values["number"], *(tuple(values[name]) for name in names))

    @property
    def shares(self) -> tuple[float, ...]:
        """By rank: what it owns, where 1 is what all would own if ports were alike."""
        each = sum(self.weights) / max(1, sum(weight > 0 for weight in self.weights))
        return tuple(weight / each for weight in self.weights)


class Pace:
    """How many ops were entered when."""

    def __init__(self) -> None:
        self.entered = 0
        self._past: deque[tuple[float, int]] = deque(maxlen=64)

    def note(self, now_s: float, entered: int) -> None:
        self.entered = max(self.entered, entered)
        self._past.append((now_s, self.entered))

    def most_within(self, span_s: float) -> int:
        """The most ops that were entered in any such span lately."""
        return max(
            (later - entered for at, entered in self._past for t, later in self._past if t - at <= span_s),
            default=0,
        )
