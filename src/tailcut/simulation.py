"""The real protocol core in virtual time: a scenario in, results and reports out. Same seed, same bits.

Owns the description of a scenario. The network model is native/drivers/simnet.hpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tailcut import _native
from tailcut.codec import CODEC_IDS, trimmed_payload_bytes
from tailcut.config import LEAST_TRIM_BYTES
from tailcut.errors import ConfigError, TailcutError
from tailcut.policy.deadline import fixed_bounds
from tailcut.report import Report, outcome_of

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Freeze:
    """A rank stands still from ``from_s`` until ``until_s``; for ever if that is None."""

    rank: int
    from_s: float
    until_s: float | None


@dataclass(frozen=True)
class Partition:
    """The ranks of ``side`` and all the others do not reach each other."""

    from_s: float
    until_s: float
    side: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A group, its program and its network. Times in seconds, probabilities per packet."""

    ranks: int
    length: int = 1024
    """Coordinates of every bucket."""
    ops: int = 1
    seed: int = 0
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

    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    trim: float = 0.0
    trim_to_bytes: int = 0
    """What is left of a trimmed packet, header included; 0: any number of bytes."""
    delay_s: float = 10e-6
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    """Of every link; 0 is unlimited."""
    queue_bytes: int = 0
    """Of every switch port; 0 is unlimited."""
    freezes: Sequence[Freeze] = ()
    partitions: Sequence[Partition] = ()
    injections: Sequence[tuple[float, int, bytes]] = ()
    """(time, destination, datagram) that no rank has sent."""

    window_ops: int = 64
    pool_bytes: int = 16 << 20
    socket_buffer_bytes: int = 1 << 20
    packet_bytes: int = 1280
    """Largest payload."""
    codec: str = "raw"
    planes: int = 16
    resend: bool = True
    """Lost packets are sent again while their stage is open."""
    paced: bool = False
    """Senders find and keep the rate of each path."""
    planes_by_rank: Mapping[int, int] = field(default_factory=dict)
    """Ranks that send with other planes than ``planes``."""
    trim_bytes: int = 0
    """As in ``Config``."""
    record: bool = False
    """Keep every packet's fate and every granule's arrival."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 4096:
            raise ConfigError(f"ranks={self.ranks} must be between 1 and 4096")
        if self.ops < 0 or self.length < 0 or self.depth < 1 or self.window_ops < 1:
            raise ConfigError("ops and length must not be negative, depth and window_ops at least 1")
        for name in ("loss", "duplicate", "corrupt", "trim"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not a probability")
        if self.codec not in CODEC_IDS:
            raise ConfigError(f"codec={self.codec!r} must be one of {', '.join(map(repr, CODEC_IDS))}")
        for planes in (self.planes, *self.planes_by_rank.values()):
            if not 1 <= planes <= 16:
                raise ConfigError(f"planes={planes} must be between 1 and 16 bits a coordinate")
        if 0 < self.trim_to_bytes <= _native.HEADER_BYTES:
            raise ConfigError(f"trim_to_bytes={self.trim_to_bytes} leaves nothing behind the header")
        if self.trim_bytes and self.trim_bytes < LEAST_TRIM_BYTES:
            raise ConfigError(f"trim_bytes={self.trim_bytes} must be 0 or at least {LEAST_TRIM_BYTES}")
        if self.packet_bytes < 256:
            raise ConfigError(f"packet_bytes={self.packet_bytes} must be at least 256")
        if self.compute_s and np.shape(self.compute_s) != (self.ops, self.ranks):
            raise ConfigError(f"compute_s has shape {np.shape(self.compute_s)}, not (ops, ranks)")

    def length_of(self, op: int, rank: int) -> int:
        return self.lengths.get((op, rank), self.length)

    def bucket(self, op: int, rank: int) -> Array:
        """What the rank contributes: a function of the seed."""
        return np.random.default_rng((self.seed, op, rank)).standard_normal(
            self.length_of(op, rank), np.float32
        )


@dataclass(frozen=True)
class Simulation:
    scenario: Scenario
    inputs: list[list[Array]]
    """[op][rank]"""
    results: list[list[Array]]
    """[op][rank]; as it was where the rank did not take part"""
    outcomes: list[list[Report | TailcutError]]
    """[rank], in the order of ending"""
    ended_s: float
    native: _native.SimResult

    def reports(self, rank: int) -> list[Report]:
        return [outcome for outcome in self.outcomes[rank] if isinstance(outcome, Report)]


def simulate(scenario: Scenario, inputs: list[list[Array]] | None = None) -> Simulation:
    """Run the scenario. ``inputs[op][rank]`` replaces the seeded buckets."""
    if inputs is None:
        inputs = [[scenario.bucket(op, rank) for rank in range(scenario.ranks)] for op in range(scenario.ops)]
    results = [[bucket.copy() for bucket in op] for op in inputs]
    native = _native.simulate(_spec(scenario), results)
    outcomes = [
        [outcome_of(report, rank) for report in reports] for rank, reports in enumerate(native.reports)
    ]
    return Simulation(scenario, inputs, results, outcomes, native.ended_at_ns / 1e9, native)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _spec(scenario: Scenario) -> _native.SimSpec:
    spec = _native.SimSpec()
    for name in (
        *("ranks", "seed", "loss", "duplicate", "corrupt", "trim", "bytes_per_s", "queue_bytes"),
        *(
            "socket_buffer_bytes",
            "pool_bytes",
            "window_ops",
            "first_seq",
            "depth",
            "record",
            "resend",
            "paced",
        ),
    ):
        setattr(spec, name, getattr(scenario, name))
    spec.delay_ns = _ns(scenario.delay_s)
    spec.jitter_ns = _ns(scenario.jitter_s)
    spec.payload_bytes = scenario.packet_bytes
    spec.codec = CODEC_IDS[scenario.codec]
    spec.trim_payload_bytes = trimmed_payload_bytes(scenario.trim_bytes)
    spec.trim_to_payload_bytes = max(0, scenario.trim_to_bytes - _native.HEADER_BYTES)
    spec.terms = _native.Terms(fixed_bounds(scenario.deadline_s), scenario.planes)
    spec.planes_by_rank = [scenario.planes_by_rank.get(r, scenario.planes) for r in range(scenario.ranks)]
    spec.linger_ns = _ns(scenario.deadline_s)
    spec.compute_ns = [[_ns(s) for s in row] for row in scenario.compute_s] or [
        [0] * scenario.ranks
    ] * scenario.ops
    spec.ops_by_rank = [scenario.ops_by_rank.get(rank, scenario.ops) for rank in range(scenario.ranks)]
    spec.resync_before = [scenario.resync_before.get(rank, 1 << 62) for rank in range(scenario.ranks)]
    for freeze in scenario.freezes:
        until_ns = None if freeze.until_s is None else _ns(freeze.until_s)
        spec.freeze(freeze.rank, _ns(freeze.from_s), until_ns)
    for partition in scenario.partitions:
        spec.partition(_ns(partition.from_s), _ns(partition.until_s), list(partition.side))
    for at_s, destination, datagram in scenario.injections:
        spec.inject(_ns(at_s), destination, datagram)
    return spec
