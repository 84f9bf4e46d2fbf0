"""How a group opens: sockets, the meeting, what all ranks conclude from it, the start of the lanes."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

from tailcut import _native
from tailcut.config import Config
from tailcut.engine.lanes import paths_to, receive_uncorrected, start_lanes
from tailcut.engine.residues import carries_coding
from tailcut.errors import ConfigError
from tailcut.grid import GridLayout, grid_of
from tailcut.ledger.writer import NO_LEDGER, LedgerWriter, NoLedger, file_name
from tailcut.meeting.rendezvous import meet
from tailcut.meeting.roster import Roster, local_address
from tailcut.meeting.sockets import open_lanes
from tailcut.policy.grid import GridSteering
from tailcut.replay.playback import Playback
from tailcut.store import Store


@dataclass(frozen=True)
class Opening:
    """One rank of an open group."""

    rank: int
    grid: GridLayout
    lanes: Sequence[_native.UdpLane]
    steering: GridSteering
    tag: int
    local_address: str
    codec: str
    store: Store
    description: str
    """What the group will do, on one line."""
    ledger: NoLedger
    playback: Playback | None = None
    """Of a replay: what is done again beside ops."""
    carries_coding: bool = False
    """What coding takes from an op enters the next op of its bucket."""


def open_rank(rank: int, world_size: int, store: Store, config: Config, name: str) -> Opening:
    """Meet the other ranks and start this one."""
    grid = _layout(rank, world_size, config)
    lanes = open_lanes(config)
    if config.receive_uncorrected:
        receive_uncorrected(lanes)
    roster = meet(store, name, rank, grid, lanes, config)
    codec = _codec(config, roster)
    steering = steering_of(rank, grid, config, codec, one_host=roster.hosts == 1)
    description = _describe(rank, config, roster, codec, steering, lanes)
    if config.receive_uncorrected:
        description += "; packets that a switch trims without correcting their lengths are received too"
    if grid.ranks > 1 and not hasattr(store, "compare_set"):
        description += "; the shares of ranks that die stay lost, because the store has no compare_set"
    ledger = _ledger(rank, grid, name, config, roster, codec)
    ledger.keep_with(lanes)
    start_lanes(
        lanes, rank=rank, grid=grid, config=config, codec=codec, terms=steering.terms(0), roster=roster
    )
    address = local_address(roster, rank)
    carried = carries_coding(config, codec, grid)
    return Opening(
        rank,
        grid,
        lanes,
        steering,
        roster.tag,
        address,
        codec,
        store,
        description,
        ledger,
        carries_coding=carried,
    )


def _ledger(rank: int, grid: GridLayout, name: str, config: Config, roster: Roster, codec: str) -> NoLedger:
    if not config.ledger:
        return NO_LEDGER
    paths = paths_to(config, roster)
    about = {
        "tailcut": metadata.version("tailcut"),
        "group": name,
        "tag": f"{roster.tag:012x}",
        "rank": rank,
        "ranks": grid.ranks,
        "rows": grid.rows,
        "hosts": roster.hosts,
        "codec": codec,
        "packet_bytes": [path.payload_bytes for path in paths],
        "trim_payload_bytes": [path.trim_payload_bytes for path in paths],
        "config": {field.name: getattr(config, field.name) for field in fields(config)},
        "host": platform.node(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "started_unix_s": time.time(),
        "started_s": time.monotonic(),
    }
    return LedgerWriter(Path(config.ledger) / file_name(name, roster.tag, rank), about)


def _layout(rank: int, world_size: int, config: Config) -> GridLayout:
    if not 1 <= world_size <= 0xFFFF:
        raise ConfigError(f"world_size={world_size} must be between 1 and 65535")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}")
    grid = grid_of(world_size, config.rows, config.multicast)
    if grid.rows > 1 and config.over_budget == "skip":
        raise ConfigError(
            f"over_budget='skip' is for groups without rows, and {world_size} ranks make "
            f"{grid.rows}: take 'wait' or 'raise', or set rows=1"
        )
    return grid


def _codec(config: Config, roster: Roster) -> str:
    """All ranks come to the same one, because they have the same roster."""
    if len(roster.cards) == 1:  # the mean is the vector
        return "raw"
    if config.codec != "auto":
        return config.codec
    return "planes" if roster.hosts > 1 else "raw"


def steering_of(
    rank: int, grid: GridLayout, config: Config, codec: str, *, one_host: bool = False
) -> GridSteering:
    return GridSteering(
        rank=rank,
        grid=grid,
        deadline_s=config.deadline_s,
        planes=config.planes if codec == "planes" else 16,
        budget=config.budget,
        over_budget=config.over_budget,
        straggler_share=config.straggler_share,
        adaptive=config.adaptive,
        trimmable=config.trim_bytes > 0,
        lanes=config.lanes,
        carries=config.late == "carry",
        carries_coding=carries_coding(config, codec, grid),
        one_host=one_host,
    )


def _describe(
    rank: int,
    config: Config,
    roster: Roster,
    codec: str,
    steering: GridSteering,
    lanes: Sequence[_native.UdpLane],
) -> str:
    coding = f"codec {codec}" + (f" with {steering.describe_planes()}" if codec == "planes" else "")
    sizes = {route.payload_bytes for peer, route in enumerate(roster.routes) if peer != rank}
    settings = ", ".join(f"{field.name}={getattr(config, field.name)!r}" for field in fields(config))
    return (
        f"{len(roster.cards)} ranks on {roster.hosts} host{'s' * (roster.hosts > 1)}, {coding}, "
        f"packets of at most {' or '.join(map(str, sorted(sizes))) or 'no'} bytes, "
        f"receive buffer of {min(lane.receive_buffer_bytes for lane in lanes)} bytes granted, "
        f"{roster.multicast.description}; {settings}; {steering.describe()}"
    )
