"""The ``tailcut`` command: it takes arguments and returns exit codes. The work is done elsewhere."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from types import FrameType

from tailcut.errors import TailcutError
from tailcut.tools.cli import bench, demo, doctor, ledger, replay, sim, testbed

EXIT_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its status, 2 after an error that was explained, or 130 after Ctrl-C."""
    options = _parsed(sys.argv[1:] if arguments is None else list(arguments))
    before = signal.signal(signal.SIGTERM, _leave_tidily)
    try:
        status: int | None = options.run(options)
    except TailcutError as error:
        print(f"tailcut: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("\ntailcut: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return status or 0


def _parsed(words: list[str]) -> argparse.Namespace:
    """Words after ``--`` are another command, and its options are not looked at."""
    own, command = words, None
    if "--" in words:
        place = words.index("--")
        own, command = words[:place], words[place + 1 :]
    parser = _parser()
    options = parser.parse_args(own)
    if command is not None and not hasattr(options, "command"):
        parser.error(f"unrecognized arguments: {' '.join(words[place:])}")
    options.command = command or []
    return options


def _leave_tidily(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tailcut", description="Gradient synchronization in which every step ends by its deadline."
    )
    parser.add_argument("--version", action="version", version=f"tailcut {metadata.version('tailcut')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo.add_command(commands)
    bench.add_command(commands)
    doctor.add_command(commands)
    testbed.add_command(commands)
    sim.add_command(commands)
    ledger.add_command(commands)
    replay.add_command(commands)
    return parser
