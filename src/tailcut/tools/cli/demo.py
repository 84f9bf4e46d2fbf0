"""The options of ``tailcut demo``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tailcut.tools import demo

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train over tailcut and over Gloo, and see what a frozen worker costs",
        description="Four local workers train a small model with DDP, once over tailcut and once over Gloo. "
        "In each run one of them is frozen for two seconds. Takes about half a minute; needs torch and "
        "scikit-learn (pip install 'tailcut[demo]').",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    demo.run()
