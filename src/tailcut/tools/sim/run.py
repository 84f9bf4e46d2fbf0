"""One run of ``tailcut sim``: its sides and its result. table.py prints it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tailcut import _native
from tailcut.codec import CODEC_IDS, trimmed_payload_bytes
from tailcut.errors import ConfigError
from tailcut.grid import grid_of
from tailcut.simulation import Scenario
from tailcut.simulation.baseline import Baseline, simulate_baseline
from tailcut.simulation.network import TCP_HEADER_BYTES
from tailcut.simulation.run import elided_buckets, spec_of
from tailcut.tools.sim.figures import (
    Losses,
    Numbers,
    Side,
    planes_nmse,
    prefix_weight,
    raw_nmse,
    trimmed_weight,
)
from tailcut.tools.sim.options import Options
from tailcut.tools.sim.translate import IP_BYTES, UDP_BYTES, Conditions, conditions_of

DEADLINE_BOUNDS = 4
"""If no deadline is given, it is this many times the least time that ports and a WAN need ..."""
DEADLINE_FLOOR_S = 0.01
"""... plus this."""
LONGEST_RUNS = 50
"""Faults that repeat do so for this many times the shortest run possible."""


@dataclass(frozen=True)
class Row:
    """The result for one number of ranks."""

    ranks: int
    conditions: Conditions
    deadline_s: float
    sides: dict[str, Side] = field(default_factory=dict)


class Progress(Protocol):
    """It is told now and then how far the run is."""

    def step(self, text: str, done: int, total: int) -> None: ...


def run(options: Options, progress: Progress | None = None) -> Generator[Row]:
    """Simulate, and yield each row when it is complete."""
    for ranks in options.all_ranks:
        scenario = options.simulated
        bound_s = 2 * (ranks - 1) / ranks * options.size_bytes / (1e6 / 8 * scenario.port.rate_mbit_s)
        shortest_s = options.ops * (bound_s + options.compute_s)
        conditions = conditions_of(
            scenario, ranks=ranks, until_s=LONGEST_RUNS * shortest_s, cores=options.cores
        )
        least_s = max(bound_s, _wan_s(options, ranks, conditions))
        deadline_s = options.deadline_s or DEADLINE_BOUNDS * least_s + DEADLINE_FLOOR_S
        total = ranks * options.ops

        def told(side: str, ranks: int = ranks, total: int = total) -> Callable[[int], None]:
            def tell(done: int) -> None:
                if progress is not None:
                    progress.step(f"{ranks} ranks, {side}", done, total)

            tell(0)
            return tell

        row = Row(ranks, conditions, deadline_s)
        row.sides["tailcut"] = _tailcut(options, row, bound_s, told("tailcut"))
        for name in options.against:
            row.sides[name] = _baseline(options, row, bound_s, name, told(name))
        yield row


def _wan_s(options: Options, ranks: int, conditions: Conditions) -> float:
    """What a WAN needs for an op of tailcut: in each stage every rank sends to all of the other site."""
    if (wan := conditions.network.wan) is None:
        return 0.0
    pairs = wan.second_site * (ranks - wan.second_site)
    return 2 * pairs * options.size_bytes / ranks / wan.bytes_per_s


def _tailcut(options: Options, row: Row, bound_s: float, tell: Callable[[int], None]) -> Side:
    switch = options.scenario.switch
    scenario = Scenario(
        **vars(row.conditions.network),
        ranks=row.ranks,
        rows=grid_of(row.ranks, options.rows).rows,
        length=options.size_bytes // 4,
        ops=options.ops,
        deadline_s=row.deadline_s,
        compute_s=_compute(options, row.ranks),
        freezes=row.conditions.freezes,
        hangs=row.conditions.hangs,
        packet_bytes=row.conditions.mtu_bytes - IP_BYTES - UDP_BYTES - _native.HEADER_BYTES,
        socket_buffer_bytes=options.receive_buffer_bytes,
        pool_bytes=max(256 << 20, 8 * options.size_bytes),
        codec=options.codec,
        planes=options.planes,
        # Where nothing trims, a Group is not told of it: packets are as long as the MTU allows.
        trim_bytes=switch.trim_frame_bytes if switch.trims else 0,
        buckets=int(options.keyed),
        paced=True,
        steering=options.adaptive,
        elided=not options.values,
    )
    spec = spec_of(scenario)
    spec.summaries = True
    if options.values:
        inputs = [[scenario.bucket(op, r) for r in range(row.ranks)] for op in range(options.ops)]
        results = [[bucket.copy() for bucket in op] for op in inputs]
    else:
        inputs, results = [], elided_buckets(scenario)
    native = _native.simulate(spec, results, tell)
    summaries = native.summaries()
    rank, op = (summaries[name].astype(np.int64) for name in ("rank", "op"))
    _check_faults(options, float(summaries["ended_at_ns"].max(initial=0)) / 1e9)
    counted = op >= options.warmup_ops
    answered = 1 - (summaries["gather_missing"] + summaries["gather_empty"]) / scenario.length
    late = summaries["late_coords"] / scenario.length
    present = 1 - summaries["scatter_missing"] / np.maximum(1, summaries["scatter_coords"])
    present *= 1 - summaries["column_missing"] / np.maximum(1, summaries["column_coords"])  # sums of rows
    living = row.ranks - sum(freeze.until_s is None for freeze in row.conditions.freezes)
    if options.values:
        nmse = _measured_nmse(inputs, results, rank[counted], op[counted])
    else:
        trimmed = summaries["trimmed_packets"] / np.maximum(1, summaries["received_packets"])
        nmse = _predicted(scenario, op[counted], np.stack([present, answered, trimmed], axis=1)[counted])
    return Side(
        times_s=_times_s(summaries[counted]),
        bound_s=bound_s,
        unfinished=max(0, living * (options.ops - options.warmup_ops) - int(counted.sum())),
        delivered=float(np.mean(answered[counted] * present[counted])) if counted.any() else 0.0,
        by_next_op=_by_next_op(rank[counted], op[counted], answered[counted], late[counted]),
        nmse=nmse,
        nmse_is_measured=options.values,
        losses=_losses(native.network, native.counters),
        notes={"packets": sum(native.fates.values()), "events": native.events},
    )


def _times_s(table: npt.NDArray[Any]) -> Numbers:
    """How long each op took."""
    times_s: Numbers = (table["ended_at_ns"] - table["entered_at_ns"]) / 1e9
    return times_s


def _check_faults(options: Options, ended_s: float) -> None:
    """Raise ConfigError if the run has ended before a fault of its scenario has begun."""
    last_s = max((fault.at_s for fault in options.scenario.faults), default=0.0)
    if ended_s < last_s:
        enough = math.ceil(1.1 * options.ops * last_s / ended_s) if ended_s else 2 * options.ops
        raise ConfigError(
            f"{options.scenario.name} has a fault at {last_s:g} s, and the run ended after {ended_s:.3g} s: "
            f"give --ops {enough} or more, or --compute"
        )


def _by_next_op(
    ranks: npt.NDArray[np.int64], ops: npt.NDArray[np.int64], answered: Numbers, late: Numbers
) -> float:
    """The share of means that came by the end of the next op. ``late`` is about the op before. The last op of
    a rank has none after it and is left out."""
    late_of = {(rank, op - 1): share for rank, op, share in zip(ranks, ops, late, strict=True)}
    shares = [
        share + late_of[rank, op]
        for rank, op, share in zip(ranks, ops, answered, strict=True)
        if (rank, op) in late_of
    ]
    return float(np.mean(shares)) if shares else 1.0


def _compute(options: Options, ranks: int) -> list[list[float]]:
    return [[options.compute_s] * ranks] * options.ops


def _measured_nmse(
    inputs: list[list[np.ndarray]], results: list[list[np.ndarray]], ranks: np.ndarray, ops: np.ndarray
) -> float:
    """The squared error over the squared norm of the true mean, on average over ops and ranks."""
    errors = []
    for op in np.unique(ops):
        mean: Numbers = np.mean(inputs[op], axis=0, dtype=np.float64)
        for rank in ranks[ops == op]:
            error = results[op][rank] - mean
            errors.append(float(np.sum(error**2)) / float(np.sum(mean**2)))
    return float(np.mean(errors)) if errors else float("nan")


def _predicted(scenario: Scenario, op: npt.NDArray[np.int64], rows: Numbers) -> float:
    """The NMSE that follows from fates. ``rows`` has the shares of contributions that came, of the result
    that came, and of packets that were trimmed."""
    kept_bytes = trimmed_payload_bytes(scenario.trim_bytes)
    granules = _native.packet_granules(
        CODEC_IDS[scenario.codec], scenario.planes, scenario.packet_bytes, kept_bytes
    )
    whole, cut = prefix_weight(scenario.planes), trimmed_weight(granules, scenario.planes, kept_bytes)
    errors = []
    for k in np.unique(op):
        present, answered, trimmed = rows[op == k].T
        if scenario.codec == "raw":
            errors.append(raw_nmse(present.mean(), answered))
        else:
            weight = whole + trimmed.mean() * (cut - whole)
            errors.append(planes_nmse(present.mean(), answered, weight, scenario.ranks))
    return float(np.mean(errors)) if errors else float("nan")


def _losses(network: _native.NetworkCounters, counters: list[_native.Counters]) -> Losses:
    fates = network.fates
    sent = max(1, sum(fates.values()))
    late = sum(c.traffic.late_packets for c in counters)
    return Losses(
        lost=fates["lost"] / sent,
        queue=(fates["queue_drop"] + fates["socket_drop"]) / sent,
        late=late / sent,
        trimmed=network.trimmed_packets / sent,
        dropped_rank=(fates["partitioned"] + fates["dead_host"]) / sent,
    )


def _baseline(options: Options, row: Row, bound_s: float, name: str, tell: Callable[[int], None]) -> Side:
    baseline = Baseline(
        **vars(row.conditions.tcp()),
        algorithm=name,
        ranks=row.ranks,
        bucket_bytes=options.size_bytes,
        ops=options.ops,
        compute_s=_compute(options, row.ranks),
        freezes=row.conditions.freezes,
        hangs=row.conditions.hangs,
        segment_bytes=row.conditions.mtu_bytes - IP_BYTES - TCP_HEADER_BYTES,
    )
    native = simulate_baseline(baseline, tell)
    ops = native.ops()
    times_s = _times_s(ops[ops["op"] >= options.warmup_ops])
    total = row.ranks * (options.ops - options.warmup_ops)
    return Side(
        times_s=times_s,
        bound_s=bound_s,
        unfinished=total - len(times_s),
        delivered=len(times_s) / total,
        by_next_op=len(times_s) / total,
        losses=_losses(native.network, []),
        notes={
            "segments": native.segments,
            "resent_segments": native.resent_segments,
            "probes": native.probes,
            "timeouts": native.timeouts,
        },
    )
