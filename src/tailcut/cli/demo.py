"""``tailcut demo``: its options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tailcut import demo

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="freeze one of four workers and see what it costs the others",
        description="Four local workers average vectors while one is frozen for a moment. Takes about 12 s.",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    demo.run()
