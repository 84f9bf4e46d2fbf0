"""The real protocol core in virtual time: a scenario in, results and reports out. Same seed, same bits.

Owns the description of a scenario: a group and its program. Its network is network.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tailcut import _native
from tailcut.codec import CODEC_IDS, trimmed_payload_bytes
from tailcut.config import LEAST_TRIM_BYTES
from tailcut.errors import ConfigError, TailcutError
from tailcut.grid import Grid
from tailcut.network import Network, Partition, ns
from tailcut.policy.deadline import fixed_bounds
from tailcut.policy.grid import COLUMN_SHARE, GridSteering
from tailcut.report import Report, outcome_of

__all__ = ["Freeze", "Partition", "Policy", "Scenario", "Simulation", "simulate"]

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Freeze:
    """A rank stands still from ``from_s`` until ``until_s``; for ever if that is None."""

    rank: int
    from_s: float
    until_s: float | None


class Policy(Protocol):
    """What decides for one rank: asked at each entry, told of each report."""

    def terms(self, length: int) -> _native.Terms: ...

    def after(self, report: Report, now_s: float) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Scenario(Network):
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
        if self.grid.rows > 1 and self.multicast:
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

    @property
    def grid(self) -> Grid:
        return Grid(self.ranks, self.rows)

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


def simulate(
    scenario: Scenario,
    inputs: list[list[Array]] | None = None,
    policies: Sequence[Policy] | None = None,
) -> Simulation:
    """Run the scenario. ``inputs[op][rank]`` replaces the seeded buckets, ``policies[rank]`` what decides."""
    if inputs is None and scenario.elided:
        inputs = elided_buckets(scenario)
    if inputs is None:
        inputs = [[scenario.bucket(op, rank) for rank in range(scenario.ranks)] for op in range(scenario.ops)]
    results = inputs if scenario.elided else [[bucket.copy() for bucket in op] for op in inputs]
    native = _native.simulate(spec_of(scenario, policies), results)
    outcomes = [
        [outcome_of(report, scenario.grid, rank) for report in reports]
        for rank, reports in enumerate(native.reports)
    ]
    return Simulation(scenario, inputs, results, outcomes, native.ended_at_ns / 1e9, native)


def elided_buckets(scenario: Scenario) -> list[list[Array]]:
    """Of the right lengths, all in the same place: nobody looks at them."""
    longest = max([scenario.length, *scenario.lengths.values()])
    zeros = np.zeros(longest, np.float32)
    return [
        [zeros[: scenario.length_of(op, rank)] for rank in range(scenario.ranks)]
        for op in range(scenario.ops)
    ]


def spec_of(scenario: Scenario, policies: Sequence[Policy] | None = None) -> _native.SimSpec:
    """The scenario as the native simulation takes it."""
    spec = _native.SimSpec()
    scenario.fill(spec)
    for name in (
        *("ranks", "rows", "socket_buffer_bytes", "pool_bytes", "window_ops", "first_seq", "depth"),
        *("record", "elided", "resend", "paced", "multicast"),
    ):
        setattr(spec, name, getattr(scenario, name))
    spec.deaf = list(scenario.deaf)
    spec.payload_bytes = scenario.packet_bytes
    spec.codec = CODEC_IDS[scenario.codec]
    spec.trim_payload_bytes = trimmed_payload_bytes(scenario.trim_bytes)
    spec.terms = _native.Terms(fixed_bounds(scenario.deadline_s), scenario.planes or 16).with_column(
        fixed_bounds(COLUMN_SHARE * scenario.deadline_s)
    )
    spec.planes_by_rank = [
        scenario.planes_by_rank.get(rank, scenario.planes) or 16 for rank in range(scenario.ranks)
    ]
    spec.linger_ns = ns(scenario.deadline_s)
    spec.compute_ns = [[ns(s) for s in row] for row in scenario.compute_s] or [
        [0] * scenario.ranks
    ] * scenario.ops
    spec.ops_by_rank = [scenario.ops_by_rank.get(rank, scenario.ops) for rank in range(scenario.ranks)]
    spec.resync_before = [scenario.resync_before.get(rank, 1 << 62) for rank in range(scenario.ranks)]
    for freeze in scenario.freezes:
        until_ns = None if freeze.until_s is None else ns(freeze.until_s)
        spec.freeze(freeze.rank, ns(freeze.from_s), until_ns)
    for at_s, destination, datagram in scenario.injections:
        spec.inject(ns(at_s), destination, datagram)
    if policies is None and scenario.steering:
        policies = _steering(scenario)
    if policies is not None:
        _let_decide(spec, policies, scenario.grid)
    return spec


def _steering(scenario: Scenario) -> list[Policy]:
    return [
        GridSteering(
            rank=rank,
            grid=scenario.grid,
            deadline_s=scenario.deadline_s,
            planes=scenario.planes_by_rank.get(rank, scenario.planes) if scenario.codec == "planes" else 16,
            budget=scenario.budget,
            trimmable=scenario.trim_bytes > 0,
        )
        for rank in range(scenario.ranks)
    ]


def _let_decide(spec: _native.SimSpec, policies: Sequence[Policy], grid: Grid) -> None:
    def decide(rank: int, now_ns: int, bucket_len: int) -> _native.Terms:
        return policies[rank].terms(bucket_len)

    def observe(rank: int, now_ns: int, report: _native.OpReport) -> None:
        outcome = outcome_of(report, grid, rank, key=report.bucket_len)
        if isinstance(outcome, Report):
            policies[rank].after(outcome, now_ns / 1e9)

    spec.decide, spec.observe = decide, observe
