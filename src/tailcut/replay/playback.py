"""What one rank of a replay needs beside its ops: what the ranks noted, and copies of each other's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tailcut.replay.player import Player
from tailcut.replay.script import Script


class Playback:
    """One rank. ``copy`` waits for the other one, and serves others meanwhile."""

    def __init__(self, script: Script, player: Player) -> None:
        self._script = script
        self.rank = player.rank
        self.give_copy = player.give_copy
        self.copy = player.copy

    def notes(self, *events: str) -> Mapping[int, Sequence[tuple[str, Mapping[str, Any]]]]:
        """By rank: the notes of these events, in order."""
        return {
            rank: [(note.event, note.values) for note in script.ledger.notes if note.event in events]
            for rank, script in self._script.ranks.items()
        }
