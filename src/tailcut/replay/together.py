"""The ranks of a replay in one process: a thread for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tailcut.replay.player import Player


def play_together(players: Sequence[Player], play: Callable[[Player], None]) -> None:
    """Let all of them play. If one fails the others hear of it, and its error is raised."""
    failures: list[BaseException] = []

    def one(player: Player) -> None:
        try:
            play(player)
            player.serve_rest()
            player.leave("it has ended")
        except BaseException as error:
            failures.append(error)
            player.leave(str(error))

    threads = [threading.Thread(target=one, args=(player,)) for player in players]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
