"""``tailcut demo --scenario freeze``: DDP trains over tailcut and over Gloo, and a worker is frozen.

It shows what the freeze costs the others, and what tailcut gives up for that.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TextIO

from tailcut.tools.demo.display import display_on
from tailcut.tools.demo.freeze import digits
from tailcut.tools.demo.freeze.director import Director, Run, Story
from tailcut.tools.demo.freeze.rows import Rows
from tailcut.tools.demo.freeze.summary import render
from tailcut.tools.demo.freeze.worker import Board, Script, Side, work
from tailcut.tools.workers import Workers


def run(script: Script | None = None, stream: TextIO | None = None) -> Story:
    """Play the script on both sides, show it live, and print what it cost. Leaves no process behind."""
    script = script or Script()
    stream = stream or sys.stdout
    images = digits.load()
    print(_introduction(script), end="\n\n", file=stream, flush=True)
    rows = Rows(display_on(stream))
    story = Story(script, play("tailcut", script, images, rows), play("gloo", script, images, rows))
    print("\n" + render(story), file=stream, flush=True)
    return story


def play(side: Side, script: Script, images: digits.Digits, rows: Rows) -> Run:
    """Train one side, in workers of its own."""
    with tempfile.TemporaryDirectory(prefix="tailcut-demo-") as name:
        directory = Path(name)
        images.save(directory / "digits.npz")
        board = Board(directory, script.ranks, create=True)
        with Workers(script.ranks, work, (side, script, directory)) as workers:
            return Director(side, script, workers, board, rows).play()


def _introduction(script: Script) -> str:
    return (
        f"{script.ranks} workers train a model of {script.parameters / 1e6:.1f} M parameters on handwritten "
        f"digits, {script.epochs} epochs, twice: over tailcut and over Gloo.\n"
        f"In each run rank {script.frozen_rank} is frozen (SIGSTOP) for {script.freeze_s:g} s at step "
        f"{script.freeze_at_step}. tailcut's deadline is {1e3 * script.deadline_s:.0f} ms."
    )
