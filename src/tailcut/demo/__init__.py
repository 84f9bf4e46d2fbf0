"""``tailcut demo``: local workers average vectors while one of them is frozen for a moment and released.

Uses only public names. It has no state to protect; it shows what a freeze costs the others.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TextIO

from tailcut.demo.director import Director, Story
from tailcut.demo.display import Log, Screen
from tailcut.demo.summary import render, summarize
from tailcut.demo.worker import Board, Script, work
from tailcut.workers import Workers


def run(script: Script | None = None, stream: TextIO | None = None) -> Story:
    """Play the script with a live display, then print what it cost. Leaves no process behind."""
    script = script or Script()
    stream = stream or sys.stdout
    print(_introduction(script), end="\n\n", file=stream, flush=True)
    with tempfile.TemporaryDirectory(prefix="tailcut-demo-") as name:
        directory = Path(name)
        board = Board(directory, script.ranks, create=True)
        with Workers(script.ranks, work, (script, directory)) as workers:
            story = Director(
                script, workers, board, Screen(stream) if stream.isatty() else Log(stream)
            ).play()
    print("\n" + render(summarize(story), story), file=stream, flush=True)
    return story


def _introduction(script: Script) -> str:
    return (
        f"{script.ranks} workers average {4 * script.count / 1e6:.1f} MB over and over; "
        f"every op ends by its deadline of {1e3 * script.deadline_s:.0f} ms.\n"
        f"After {script.before_s:g} s, rank {script.frozen_rank} is frozen for {script.freeze_s:g} s."
    )
