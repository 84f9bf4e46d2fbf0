"""The options of ``tailcut doctor``, how its ranks find each other, and where its output goes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.store import FileStore, Store
from tailcut.tools import doctor
from tailcut.tools.cli.sizes import size_bytes
from tailcut.tools.doctor import render

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="examine this host, and with peers the network between them",
        description="Alone it examines this host. Started on every rank, by torchrun (--no-python tailcut "
        "doctor) or with --store, it also measures round trips, loss and allreduce between the ranks, and "
        "rank 0 prints. Exit status: 0 without a failed check, 1 with one, 2 when it cannot be run.",
    )
    parser.set_defaults(run=_run)
    add = parser.add_argument
    peers = parser.add_mutually_exclusive_group()
    peers.add_argument("--local", type=int, metavar="N", help="start N ranks on this host")
    peers.add_argument("--store", type=Path, metavar="DIRECTORY", help="meet in a directory that all see")
    add("--rank", type=int, metavar="R", help="with --store: which rank this is")
    add(
        "--world-size",
        type=int,
        metavar="N",
        help="how many ranks there are; alone, for how many to judge (8)",
    )
    add("--bucket", type=size_bytes, default=25 << 20, metavar="SIZE", help="bucket to average (25M)")
    add("--wait", type=float, metavar="SECONDS", help="for peers (default: Config.rendezvous_s)")
    add("--json", action="store_true", help="print one JSON document instead")


def _run(arguments: argparse.Namespace) -> int:
    options = doctor.Options(_config(arguments), arguments.bucket)

    def show(diagnosis: doctor.Diagnosis) -> None:
        text = (
            json.dumps(render.as_json(diagnosis), indent=1) if arguments.json else render.as_text(diagnosis)
        )
        print(text, flush=True)

    if arguments.rank is not None and arguments.store is None:
        raise ConfigError("--rank needs --store: the directory where the ranks meet")
    if arguments.local is not None:
        diagnosis = doctor.run_local(_between(2, arguments.local, 256, "--local"), options)
    elif arguments.store is not None or all(os.environ.get(name) for name in _TORCHRUN):
        rank, world_size, store = _place(arguments, options)
        return doctor.run_member(rank, world_size, store, options, show, _complain)
    else:
        judged_for = doctor.ASSUMED_WORLD_SIZE if arguments.world_size is None else arguments.world_size
        diagnosis = doctor.run_alone(options, _between(1, judged_for, 0xFFFF, "--world-size"))
    show(diagnosis)
    return diagnosis.exit_status


def _config(arguments: argparse.Namespace) -> Config:
    config = Config()
    return config if arguments.wait is None else replace(config, rendezvous_s=arguments.wait)


def _place(arguments: argparse.Namespace, options: doctor.Options) -> tuple[int, int, Store]:
    """Which rank this is, how many there are, and where they meet."""
    if arguments.store is not None:
        if arguments.rank is None or arguments.world_size is None:
            raise ConfigError("--store needs --rank and --world-size as well")
        return *_checked(arguments.rank, arguments.world_size), FileStore(arguments.store)
    try:
        rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    except ValueError:
        raise ConfigError("RANK and WORLD_SIZE in the environment are not whole numbers") from None
    rank, world_size = _checked(rank, world_size)
    from tailcut.pytorch.store import environment_store  # torch is optional, and its import takes long

    return rank, world_size, environment_store(options.config.rendezvous_s)


def _checked(rank: int, world_size: int) -> tuple[int, int]:
    if not 0 <= rank < world_size <= 0xFFFF:
        raise ConfigError(f"rank {rank} of {world_size}: a rank is from 0 to the world size - 1")
    return rank, world_size


def _between(low: int, value: int, high: int, name: str) -> int:
    if not low <= value <= high:
        raise ConfigError(f"{name} {value} must be between {low} and {high}")
    return value


def _complain(text: str) -> None:
    print(f"tailcut: {text}", file=sys.stderr, flush=True)
