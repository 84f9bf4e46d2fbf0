"""The options of ``tailcut demo``."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailcut.errors import ConfigError
from tailcut.tools import demo
from tailcut.tools.bench import machine
from tailcut.tools.demo import freeze

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

FREEZE = "freeze"


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train over Gloo, Gloo with fp16 and tailcut on a testbed, and get a report",
        description="Trains the same model over Gloo, over Gloo with torch's fp16 hook and over tailcut, for "
        "the same time each, on a testbed inside this machine (root, or a user namespace; loopback with "
        "stragglers where neither works). Takes three to four minutes, writes report.html, and ends with the "
        "verdict. Needs torch and scikit-learn (pip install 'tailcut[demo]').",
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    add(
        "--scenario",
        metavar="NAME",
        help=f"of tailcut testbed scenarios, or a file.toml (default: tail-3); {FREEZE}: one of four local "
        "workers stands still for two seconds, half a minute in all, without a report",
    )
    add("--model", help="cnn, mlp, resnet or gpt (default: cnn)")
    add(
        "--data",
        help="directory of Fashion-MNIST, or a text for gpt (default: $TAILCUT_DATA; without it, or with "
        "none: scikit-learn's digits, and for gpt Python's help)",
    )
    add("--workers", type=int, metavar="N", help="one on each host (default: the scenario's, mostly 4)")
    add("--seeds", type=int, metavar="N", help="runs of each side (default: 1)")
    add("--seconds", type=float, metavar="S", help="of training in each run (default: 40)")
    add("--loopback", action="store_true", default=None, help="no testbed: stragglers on 127.0.0.1")
    add("--output", type=Path, metavar="DIR", help="where the report goes (default: ./tailcut-demo)")


def _run(arguments: argparse.Namespace) -> int:
    names = ("scenario", "model", "data", "workers", "seeds", "seconds", "loopback", "output")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if given.get("scenario") == FREEZE:
        if others := [f"--{name}" for name in given if name != "scenario"]:
            raise ConfigError(f"--scenario {FREEZE} has a script of its own and takes no {', '.join(others)}")
        freeze.run()
        return 0
    options = demo.Options(**{**given, "data": demo.data_of(arguments.data)})
    results = demo.run(options, machine.describe() | _commit())
    return 1 if results.failures("tailcut") else 0


def _commit() -> dict[str, str]:
    """The commit of the checkout that this is run from, if it is run from one."""
    if not Path("src/tailcut").is_dir():
        return {}
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return {}
    return {"commit": said} if said else {}
