"""The description of a simulated group and its program. Its network is network.py, what runs it run.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tailcut.codec import CODEC_IDS
from tailcut.config import LEAST_TRIM_BYTES
from tailcut.errors import ConfigError
from tailcut.grid import GridLayout
from tailcut.simulation.network import SimulatedNetwork

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Freeze:
    """A rank stands still from ``from_s`` until ``until_s``; for ever if that is None."""

    rank: int
    from_s: float
    until_s: float | None


@dataclass(frozen=True, kw_only=True)
class Scenario(SimulatedNetwork):
    """A group, its program and its network. Times in seconds, probabilities per packet."""

    ranks: int
    rows: int = 1
    """Of a grid; 1: a flat group."""
    length: int = 1024
    """Coordinates of every bucket."""
    ops: int = 1
    deadline_s: float = 0.1
    depth: int = 1
    """Ops a rank keeps in flight."""
    compute_s: Sequence[Sequence[float]] = ()
    """[op][rank]: from entering the op before, and finishing the one ``depth`` before, to entering."""
    lengths: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(op, rank) -> a length other than ``length``."""
    ops_by_rank: Mapping[int, int] = field(default_factory=dict)
    """Ranks that do fewer ops and then say goodbye."""
    resync_before: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the op before which it declares its state copied."""
    first_seq: int = 0

    freezes: Sequence[Freeze] = ()
    injections: Sequence[tuple[float, int, bytes]] = ()
    """(time, destination, datagram) that no rank has sent."""

    window_ops: int = 64
    pool_bytes: int = 16 << 20
    socket_buffer_bytes: int = 1 << 20
    packet_bytes: int = 1280
    """Largest payload."""
    codec: str = "raw"
    planes: int = 16
    """0, with ``steering``: from the budget, as in a Group."""
    budget: float = 0.05
    resend: bool = True
    """Lost packets are sent again while their stage is open."""
    paced: bool = False
    """Senders find and keep the rate of each path."""
    multicast: bool = False
    """Every rank hears every other's multicast, but for the ``deaf`` ones."""
    deaf: Sequence[int] = ()
    planes_by_rank: Mapping[int, int] = field(default_factory=dict)
    """Ranks that send with other planes than ``planes``."""
    trim_bytes: int = 0
    """As in ``Config``."""
    steering: bool = False
    """Every rank adapts its bounds as a Group does; without, they are fixed shares of ``deadline_s``."""
    elided: bool = False
    """No values: fates and times only, for more ranks and ops than there is memory for. Results are zeros."""
    record: bool = False
    """Keep every packet's fate and every granule's arrival."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 4096:
            raise ConfigError(f"ranks={self.ranks} must be between 1 and 4096")
        if self.ops < 0 or self.length < 0 or self.depth < 1 or self.window_ops < 1:
            raise ConfigError("ops and length must not be negative, depth and window_ops at least 1")
        self.check_network()
        if GridLayout(self.ranks, self.rows).rows > 1 and self.multicast:
            raise ConfigError("a grid has no multicast")
        if self.codec not in CODEC_IDS:
            raise ConfigError(f"codec={self.codec!r} must be one of {', '.join(map(repr, CODEC_IDS))}")
        for planes in (self.planes, *self.planes_by_rank.values()):
            if not (0 if self.steering else 1) <= planes <= 16:
                raise ConfigError(f"planes={planes} must be between 1 and 16 bits a coordinate")
        if self.trim_bytes and self.trim_bytes < LEAST_TRIM_BYTES:
            raise ConfigError(f"trim_bytes={self.trim_bytes} must be 0 or at least {LEAST_TRIM_BYTES}")
        if self.packet_bytes < 256:
            raise ConfigError(f"packet_bytes={self.packet_bytes} must be at least 256")
        if len(self.compute_s) and np.shape(self.compute_s) != (self.ops, self.ranks):
            raise ConfigError(f"compute_s has shape {np.shape(self.compute_s)}, not (ops, ranks)")

    def length_of(self, op: int, rank: int) -> int:
        return self.lengths.get((op, rank), self.length)

    def bucket(self, op: int, rank: int) -> Array:
        """What the rank contributes: a function of the seed."""
        return np.random.default_rng((self.seed, op, rank)).standard_normal(
            self.length_of(op, rank), np.float32
        )
