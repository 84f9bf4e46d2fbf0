"""An independent account of a simulated run: from what the network delivered to what every rank must hold.

Reads the record of deliveries and the times at which SCATTER closed and ops ended; computes contributions and
results in plain NumPy, raw to the last bit, planes from the bits that came of every granule. Shares no code
with the core.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tailcut import Report, Scenario, Simulation, _native
from tests.quantizer import (
    GRANULE,
    MEASURED_BITS,
    Coded,
    bits_left,
    coded_contribution,
    coded_mean,
)
from tests.rotation import block_key, rotate, rotate_back
from tests.tables import rows

MOST_UNBIASING = 4


def granules_of(length: int) -> int:
    return max(1, -(-length // GRANULE))


def rank_order_mean(contributions: list[np.ndarray]) -> np.ndarray:
    total = contributions[0].copy()
    for contribution in contributions[1:]:
        total += contribution
    return total / np.float32(len(contributions))


class RawValues:
    """A mean is that of the coordinates; what a rank lacks is zero."""

    def __init__(self, scenario: Scenario, seq: int, shard: int, length: int) -> None:
        self._granules = granules_of(length)
        self._length = length

    def mean(self, shares: list[np.ndarray], bits: list[np.ndarray], owner: int) -> np.ndarray:
        mean = np.zeros(self._length, np.float32)
        for g in range(self._granules):
            at = slice(g * GRANULE, (g + 1) * GRANULE)
            present = [share[at] for share, came in zip(shares, bits, strict=True) if came[g]]
            if present:
                mean[at] = rank_order_mean(present)
        return mean

    def check(self, values: np.ndarray, mean: np.ndarray, bits: np.ndarray) -> None:
        mask = np.repeat(bits > 0, GRANULE)[: self._length]
        assert not values[~mask].any(), "not zero where nothing came"
        assert values[mask].tobytes() == mean[mask].tobytes(), "not the mean of what came"

    def comparable(self, values: np.ndarray, bits: np.ndarray) -> dict[int, bytes]:
        """What must be equal on every rank that has it."""
        return {g: values[g * GRANULE : (g + 1) * GRANULE].tobytes() for g in map(int, np.flatnonzero(bits))}


class PlanesValues:
    """A mean is that of rotated coordinates, each counting by what its bits tell; the owner codes it again.

    What a rank lacks is zero among the rotated coordinates, and one factor for each block makes up for it.
    """

    def __init__(self, scenario: Scenario, seq: int, shard: int, length: int) -> None:
        self._length = length
        self._scenario = scenario
        self._blocks = [
            (begin, n, block_key(scenario.seed, seq, shard, k))
            for k, (begin, n) in enumerate(_native.codec_blocks(length))
        ]
        self._padded = sum(n for _, n, _ in self._blocks)

    def mean(self, shares: list[np.ndarray], bits: list[np.ndarray], owner: int) -> list[Coded]:
        """By block, as the owner sends it."""
        padded = [np.pad(share.astype(np.float64), (0, self._padded - share.size)) for share in shares]
        return [
            self._mean_block(
                [x[begin : begin + n] for x in padded],
                [came[begin // GRANULE : (begin + n) // GRANULE] for came in bits],
                key,
                owner,
            )
            for begin, n, key in self._blocks
        ]

    def _mean_block(self, shares: list[np.ndarray], bits: list[np.ndarray], key: int, owner: int) -> Coded:
        total, doubt = np.zeros(shares[0].size), np.zeros(shares[0].size)
        weights = np.zeros(bits[0].size, np.float32)
        gaussian, doubtful = True, False
        for rank, (x, came) in enumerate(zip(shares, bits, strict=True)):
            if not came.any():
                continue
            sent = coded_contribution(x, rotate(x, key), planes_of(self._scenario, rank), key)
            gaussian = gaussian and not sent.far_from_gaussian
            if rank == owner:  # its own is whole
                total += sent.z
                weights += np.float32(1)
            else:
                total += sent.values(came)
                doubt += sent.doubts(came)
                weights += sent.weights(came)
                doubtful = doubtful or sent.doubtful_weights(came)
                gaussian = gaussian and bool((came >= MEASURED_BITS).all())
        present = weights > 0
        divisor = np.repeat(np.where(present, weights, 1).astype(np.float64), GRANULE)
        return coded_mean(
            total / divisor,
            doubt / divisor,
            present,
            planes_of(self._scenario, owner),
            key,
            gaussian=gaussian,
            even=bool((weights == weights[0]).all()),
            doubtful_weights=doubtful,
        )

    def check(self, values: np.ndarray, mean: list[Coded], bits: np.ndarray) -> None:
        for (begin, n, _), sent in zip(self._blocks, mean, strict=True):
            came = bits[begin // GRANULE : (begin + n) // GRANULE]
            got = values[begin : begin + n]
            assert came.any() or not got.any(), "not zero where nothing came"
            expected, tolerance = result_of(sent, came.tobytes())
            error = float(np.sum((got - expected[: got.size]) ** 2))
            assert error <= tolerance, f"not the mean of what came: {error:.3g} > {tolerance:.3g}"

    def comparable(self, values: np.ndarray, bits: np.ndarray) -> dict[int, bytes]:
        whole = max(1, int(bits.max(initial=0)))
        return {
            begin: values[begin : begin + n].tobytes()
            for begin, n, _ in self._blocks
            if (bits[begin // GRANULE : (begin + n) // GRANULE] == whole).all()
        }


@lru_cache(maxsize=64)  # most ranks get all of a mean
def result_of(sent: Coded, bits: bytes) -> tuple[np.ndarray, float]:
    """What a block becomes for a rank that gets so many bits of each granule, and how far off it may be."""
    came = np.frombuffer(bits, int)
    weight = GRANULE * float(sent.weights(came).sum(dtype=np.float64))
    scale = min(MOST_UNBIASING, sent.z.size / weight) if weight else 0.0
    expected = scale * rotate_back(sent.values(came), sent.key)
    # Rounding, and what lies at the edges of cells.
    energy, doubts = float((expected**2).sum()), float(((scale * sent.doubts(came)) ** 2).sum())
    tolerance = 1e-8 * (energy + expected.size) + 4 * doubts
    return expected, tolerance + (1e-3 * energy if sent.doubtful_weights(came) else 0.0)


VALUES: dict[str, type[RawValues | PlanesValues]] = {"raw": RawValues, "planes": PlanesValues}


def planes_of(scenario: Scenario, rank: int) -> int:
    """What the rank sends with: fixed in every scenario that comes here."""
    return scenario.planes_by_rank.get(rank, scenario.planes)


class Run(NamedTuple):
    """One packet that reached a rank."""

    at: int
    first: int
    """Granule."""
    bits: np.ndarray
    """Of the granules from there on that came."""
    empty: bool
    completes: bool
    """Came whole, and gives what an earlier one that was trimmed lacks."""


class Deliveries:
    """What reached each rank, by (seq, stage, source, destination)."""

    def __init__(self, simulation: Simulation) -> None:
        self._runs: dict[tuple[int, bool, int, int], list[Run]] = defaultdict(list)
        self._over: dict[tuple[int, int, int], int] = {}
        scenario = simulation.scenario
        for packet in rows(simulation.native.deliveries()):
            if packet.over:
                self._over.setdefault((packet.seq, packet.source, packet.destination), packet.at_ns)
            begin, end = _native.shard_range(packet.bucket_len, scenario.ranks, packet.shard)
            granules, payload = granules_of(packet.count or end - begin), packet.payload_bytes
            whole = payload == packet.stated_payload_bytes
            if packet.count == 0 or packet.empty:
                bits = np.ones(granules, int)
            elif scenario.codec == "raw":
                bits = np.ones(granules if whole else min(granules, payload // (4 * GRANULE)), int)
            else:
                planes = planes_of(scenario, packet.source)
                table_bytes = packet.stated_payload_bytes - 8 * granules * planes
                left = bits_left(granules, planes, table_bytes, payload)
                bits = left[left > 0]
            refined = packet.gather and (
                scenario.codec == "raw" or (scenario.late == "carry" and scenario.buckets)
            )
            if scenario.resend and not refined and not packet.empty and len(bits) < granules:
                bits = bits[:0]  # it is taken in when it comes again
            completes = packet.gather and whole and not packet.empty and scenario.codec == "raw"
            run = Run(packet.at_ns, packet.first // GRANULE, bits, packet.empty, completes)
            self._runs[packet.seq, packet.gather, packet.source, packet.destination].append(run)

    def bits(
        self, seq: int, gather: bool, source: int, destination: int, granules: int, until_ns: int
    ) -> np.ndarray:
        """By granule: how many bits had come by then, 0 for none; of raw values, 1 for all."""
        bits, answered = np.zeros(granules, int), np.zeros(granules, bool)
        for run in self._runs[seq, gather, source, destination]:
            if run.at > until_ns:
                continue
            at = slice(run.first, run.first + len(run.bits))
            if run.empty and not gather:  # W10: nothing more is taken from this source
                answered[:] = True
            elif run.completes or not answered[at].any():  # W9: another overlapping run is a duplicate
                bits[at] = np.where(answered[at], bits[at], 0 if run.empty else run.bits)
                answered[at] = True
        return bits

    def told_over(self, seq: int, source: int, destination: int, until_ns: int) -> bool:
        """Whether the source had told that it had ended the op."""
        return self._over.get((seq, source, destination), until_ns + 1) <= until_ns


def check(simulation: Simulation) -> None:
    """Assert that every reported op holds exactly the count-weighted mean of what arrived, else zero."""
    scenario = simulation.scenario
    deliveries = Deliveries(simulation)
    natives = [
        {report.seq: report for report in reports if report.status in ("complete", "partial")}
        for reports in simulation.native.reports
    ]
    for op in range(scenario.ops):
        seq = scenario.first_seq + op
        means = _check_contributions(simulation, op, deliveries, natives)
        unverified: dict[tuple[int, int], bytes] = {}
        for rank in range(scenario.ranks):
            native = natives[rank].get(seq)
            if native is None:
                continue
            result = simulation.results[op][rank]
            for shard in range(scenario.ranks):
                begin, end = _native.shard_range(len(result), scenario.ranks, shard)
                owner = _native.owner_of(shard, seq, scenario.ranks, scenario.seed)
                held = np.frombuffer(native.held()[shard], bool)
                bits = held * planes_of(scenario, rank)
                if owner != rank:
                    granules = granules_of(end - begin)
                    before, by = (
                        deliveries.bits(seq, True, owner, rank, granules, native.ended_at - tie_ns)
                        for tie_ns in (1, 0)  # what comes with the deadline may come just after it
                    )
                    place = f"op {op} rank {rank} shard {shard}"
                    assert (held <= (by > 0)).all(), f"{place}: holds what did not come"
                    assert (held >= (before > 0)).all(), f"{place}: lacks what came"
                    bits = held * by
                values = VALUES[scenario.codec](scenario, seq, shard, end - begin)
                if owner in means:
                    values.check(result[begin:end], means[owner], bits)
                else:  # the owner died without a report: at least all agree on what it sent
                    for at, part in values.comparable(result[begin:end], bits).items():
                        assert part == unverified.setdefault((shard, at), part)


def _check_contributions(
    simulation: Simulation, op: int, deliveries: Deliveries, natives: list
) -> dict[int, Any]:
    """By owner with a report: the mean of its shard, from the contributions that came before it closed."""
    scenario = simulation.scenario
    seq = scenario.first_seq + op
    means = {}
    for owner in range(scenario.ranks):
        native = natives[owner].get(seq)
        if native is None:
            continue
        begin, end = _native.shard_range(native.bucket_len, scenario.ranks, native.own_shard)
        granules = granules_of(end - begin)
        used = [np.frombuffer(contribution, bool) for contribution in native.contributions()]
        masks, bits = [], []
        for rank in range(scenario.ranks):
            if rank == owner:
                entered = native.entered_at <= native.closed_at and native.contributed
                came = by = np.full(granules, entered)
            else:
                before, by = (
                    deliveries.bits(seq, False, rank, owner, granules, native.closed_at - tie_ns)
                    for tie_ns in (1, 0)  # what comes as SCATTER closes may come just after it
                )
                came = by > 0
                if ((before > 0) <= used[rank]).all() and (used[rank] <= came).all():
                    came = used[rank]
            if not native.links[rank].awaited and (used[rank] <= came).all():
                came = used[rank]  # a granule was reduced when those who are awaited had delivered it
            masks.append(came)
            bits.append(by * used[rank] if end > begin else by)
        if end > begin and not _others_apply(simulation, op, owner, native, deliveries):
            # Each granule has what had come, or is nobody's.
            for g in range(granules):
                users = [u[g] for u in used]
                assert not any(users) or users == [m[g] for m in masks], f"op {op} owner {owner}: granule {g}"
            masks = used
        for rank in range(scenario.ranks):
            same = end == begin or np.array_equal(used[rank], masks[rank])
            assert same, f"op {op} owner {owner}: contribution of rank {rank}"
        values = VALUES[scenario.codec](scenario, seq, native.own_shard, end - begin)
        means[owner] = values.mean([bucket[begin:end] for bucket in simulation.inputs[op]], bits, owner)
    return means


def _others_apply(simulation: Simulation, op: int, owner: int, native, deliveries: Deliveries) -> bool:
    """Whether anybody but the owner must be thought, when it closed its shard, to apply its mean: one that
    had not ended the op, was not silent, and cannot have been known to have left."""
    scenario, closed_at = simulation.scenario, native.closed_at
    return any(
        not deliveries.told_over(scenario.first_seq + op, rank, owner, closed_at)
        and not native.links[rank].silent
        and op < scenario.ops_by_rank.get(rank, scenario.ops)
        and closed_at <= simulation.native.closed_at_ns[rank]
        for rank in range(scenario.ranks)
        if rank != owner
    )


def check_deadlines(simulation: Simulation) -> None:
    """Assert that every living rank has an outcome for each of its ops, in time unless it was frozen."""
    scenario = simulation.scenario
    for rank in range(scenario.ranks):
        freezes = [f for f in scenario.freezes if f.rank == rank]
        if any(f.until_s is None for f in freezes):
            continue
        assert len(simulation.outcomes[rank]) == scenario.ops_by_rank.get(rank, scenario.ops)
        for native, outcome in zip(simulation.native.reports[rank], simulation.outcomes[rank], strict=True):
            assert isinstance(outcome, Report), outcome
            limit = native.entered_at + round(scenario.deadline_s * 1e9)
            for f in freezes:
                if f.from_s * 1e9 <= limit and f.until_s is not None:
                    limit = max(limit, round(f.until_s * 1e9))
            assert native.ended_at <= limit, f"rank {rank}: {outcome}"
