"""``tailcut replay``: a training script again, as many processes as the run had ranks; or one op again."""

from __future__ import annotations

import argparse
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tailcut import ConfigError, Ledger
from tailcut.replay import single
from tailcut.replay.script import check_whole
from tailcut.tools.ledger.explain import explain

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

LOOK_S = 0.05
END_S = 30.0
"""So long the others have to end after one has failed. They hear of it when they need something of it, but
not in a collective of Gloo."""


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "replay",
        help="train again with the losses and decisions of a ledger, to the bit",
        usage="tailcut replay DIRECTORY [--op N --dump FILE] -- COMMAND ...\n       tailcut replay FILE",
        description="Starts the command once for each rank of the run, on this machine, with the variables "
        "that torchrun sets. What the network and the clock did then is taken from the ledgers. With a FILE "
        "that --dump has made, its op is computed again, and its mean explained.",
    )
    parser.set_defaults(run=_run, command=None)
    parser.add_argument("source", type=Path, metavar="DIRECTORY or FILE")
    parser.add_argument("--op", type=int, metavar="N", help="end with this op, and store it with --dump")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="where the inputs and outputs of --op go")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.source.is_file():
        return _one_op_again(arguments.source)
    if not arguments.command:
        raise ConfigError("name the training script: tailcut replay DIRECTORY -- python train.py")
    if (arguments.op is None) != (arguments.dump is None):
        raise ConfigError("--op N and --dump FILE go together: which op is stored, and where")
    ledger = Ledger.open(arguments.source)
    check_whole(ledger)
    env = {"TAILCUT_REPLAY": str(arguments.source.resolve()), "TAILCUT_LEDGER": ""}
    if arguments.op is None:
        return _train(ledger, arguments.command, env)
    return _store(ledger, arguments.command, env, arguments.op, arguments.dump.resolve())


def _train(ledger: Ledger, command: list[str], env: Mapping[str, str]) -> int:
    codes = _started(ledger, command, env)
    for rank, code in codes.items():
        if code and not ledger.ranks[rank].closed:
            print(f"tailcut: rank {rank} died in the run, and so did its replay", file=sys.stderr)
    return 1 if any(code and ledger.ranks[rank].closed for rank, code in codes.items()) else 0


def _store(ledger: Ledger, command: list[str], env: Mapping[str, str], op: int, file: Path) -> int:
    ended = ledger.op(op)
    _started(ledger, command, {**env, "TAILCUT_REPLAY_DUMP": f"{op}:{file}"})
    missing = [rank for rank in ledger.ranks if not single.part_of(file, rank).exists()]
    if not missing:
        single.join(file, ledger.ranks)
        missing = sorted(ended.keys() - single.read(file).outputs.keys())
    if missing:
        file.unlink(missing_ok=True)
        print(f"tailcut: rank {missing[0]} did not come to op {op}", file=sys.stderr)
        return 1
    print(f"op {op} is in {file}: tailcut replay {file} computes it again")
    return 0


def _one_op_again(file: Path) -> int:
    """Compute it, compare it, explain it."""
    stored = single.read(file)
    results = stored.again()
    for line in explain(stored.ledger, stored.seq):
        print(line)
    same = {rank: results[rank].tobytes() == was.tobytes() for rank, was in stored.outputs.items()}
    for rank, alike in same.items():
        words = "the same bits as then" if alike else "OTHER BITS than then"
        print(f"op {stored.seq} at rank {rank}, computed again: {words}")
    return 0 if all(same.values()) else 1


def _started(ledger: Ledger, command: list[str], env: Mapping[str, str]) -> dict[int, int]:
    """Run the command for each rank; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = {
        rank: subprocess.Popen(command, env={**os.environ, **env, **_variables(ledger, rank, port)})
        for rank in ledger.ranks
    }
    return _codes(ledger, processes)


def _codes(ledger: Ledger, processes: Mapping[int, subprocess.Popen[bytes]]) -> dict[int, int]:
    """The exit codes of all. After a failure the others end by themselves, or are ended."""
    codes: dict[int, int] = {}
    ends_s = math.inf
    while len(codes) < len(processes):
        for rank, process in processes.items():
            if rank not in codes and (code := _code(process)) is not None:
                codes[rank] = code
                if code and ledger.ranks[rank].closed:
                    ends_s = min(ends_s, time.monotonic() + END_S)
        if time.monotonic() > ends_s:
            for process in processes.values():
                process.terminate()
    return codes


def _code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(LOOK_S)
    except subprocess.TimeoutExpired:
        return None


def _variables(ledger: Ledger, rank: int, port: int) -> dict[str, str]:
    ranks = str(ledger.world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
