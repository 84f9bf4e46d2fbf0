"""How a group opens that plays a ledger: no sockets and no meeting, but the records of all ranks."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import cast

from tailcut import _native
from tailcut.config import Config
from tailcut.engine.opening import Opening, steering_of
from tailcut.engine.residues import carries_coding
from tailcut.errors import ConfigError
from tailcut.grid import GridLayout
from tailcut.ledger.book import Ledger
from tailcut.ledger.writer import NO_LEDGER, run_name
from tailcut.replay.exchange import FileExchange
from tailcut.replay.lane import DumpingLane, ReplayLane
from tailcut.replay.playback import Playback
from tailcut.replay.player import Player
from tailcut.replay.script import Script
from tailcut.replay.single import Dump
from tailcut.store import Store


class _NoStore:
    """Nothing is agreed on: the record has it."""

    def set(self, key: str, value: bytes) -> None:
        pass

    def get(self, key: str) -> bytes:
        raise KeyError(key)


def open_replay(rank: int, world_size: int, store: Store, config: Config, name: str) -> Opening:
    """One rank of a group whose ledgers are in ``config.replay``."""
    ledger = Ledger.open(config.replay, run_name(name))
    _check(ledger, world_size, config)
    script = Script(ledger)
    exchange = FileExchange(_meeting_place(rank, store, name), rank, world_size)
    player = Player(script, rank, exchange)
    lane = _lane(player, script, rank, config)
    grid = GridLayout(world_size)
    codec = str(ledger.about["codec"])
    config = replace(config, **{name: ledger.about["config"][name] for name in ("late", "residue", "planes")})
    return Opening(
        rank,
        grid,
        [cast(_native.UdpLane, lane)],
        steering_of(rank, grid, config, codec),
        int(ledger.about["tag"], 16),
        "replay",
        codec,
        _NoStore(),
        f"replay of {ledger.run} in {config.replay!r}: {ledger.described_ops()}",
        NO_LEDGER,
        Playback(script, player),
        carries_coding(config, codec, grid),
    )


def _lane(player: Player, script: Script, rank: int, config: Config) -> ReplayLane:
    if not config.replay_dump:
        return ReplayLane(player, script.ranks[rank])
    op, colon, file = config.replay_dump.partition(":")
    if not colon or not op.isdigit():
        raise ConfigError(f"replay_dump={config.replay_dump!r} must be an op and a file, as 17:op17.npz")
    return DumpingLane(player, script.ranks[rank], Dump(Path(file), int(op), script, rank))


def _check(ledger: Ledger, world_size: int, config: Config) -> None:
    where = f"replay={config.replay!r}"
    if ledger.world_size != world_size:
        raise ConfigError(
            f"{where}: the ledger is of {ledger.world_size} ranks, and this group has {world_size}; start as "
            "many processes (tailcut replay does)"
        )
    version = metadata.version("tailcut")
    if ledger.about["tailcut"] != version:
        raise ConfigError(
            f"{where}: tailcut {ledger.about['tailcut']} has recorded it, and this is {version}, whose "
            "arithmetic may differ; replay it with the version that recorded it"
        )


def _meeting_place(rank: int, store: Store, name: str) -> Path:
    """A directory that all processes share, in memory where there is such a place."""
    key = f"tailcut/replay/{name}"
    if rank == 0:
        memory = Path("/dev/shm")
        place = tempfile.mkdtemp(prefix="tailcut-replay-", dir=memory if memory.is_dir() else None)
        store.set(key, place.encode())
        return Path(place)
    return Path(bytes(store.get(key)).decode())
