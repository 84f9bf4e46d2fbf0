"""An independent account of a simulated run: from what the network delivered to what every rank must hold.

Reads the record of deliveries and the times at which SCATTER closed and ops ended; computes contributions and
results in plain NumPy, raw to the last bit, planes (all 16 of them) up to their error. Shares no code with
the core.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tailcut import Report, Scenario, Simulation, _native
from tests.rotation import block_key, rotate, rotate_back
from tests.tables import rows

GRANULE = 64
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

    def mean(self, shares: list[np.ndarray], masks: list[np.ndarray]) -> np.ndarray:
        mean = np.zeros(self._length, np.float32)
        for g in range(self._granules):
            at = slice(g * GRANULE, (g + 1) * GRANULE)
            present = [share[at] for share, mask in zip(shares, masks, strict=True) if mask[g]]
            if present:
                mean[at] = rank_order_mean(present)
        return mean

    def check(self, values: np.ndarray, mean: np.ndarray, held: np.ndarray) -> None:
        mask = np.repeat(held, GRANULE)[: self._length]
        assert not values[~mask].any(), "not zero where nothing came"
        assert values[mask].tobytes() == mean[mask].tobytes(), "not the mean of what came"

    def comparable(self, values: np.ndarray, held: np.ndarray) -> dict[int, bytes]:
        """What must be equal on every rank that has it."""
        return {g: values[g * GRANULE : (g + 1) * GRANULE].tobytes() for g in map(int, np.flatnonzero(held))}


class PlanesValues:
    """A mean is that of rotated coordinates; what a rank lacks is zero among them, and the rest is scaled."""

    def __init__(self, scenario: Scenario, seq: int, shard: int, length: int) -> None:
        self._length = length
        self._blocks = [
            (begin, n, block_key(scenario.seed, seq, shard, k))
            for k, (begin, n) in enumerate(_native.codec_blocks(length))
        ]
        self._checked = scenario.trim == 0 and scenario.planes == 16 and not scenario.planes_by_rank
        self._padded = sum(n for _, n, _ in self._blocks)

    def mean(self, shares: list[np.ndarray], masks: list[np.ndarray]) -> np.ndarray:
        """In the rotated domain."""
        total, count = np.zeros(self._padded), np.zeros(self._padded)
        for share, mask in zip(shares, masks, strict=True):
            padded = np.pad(share.astype(np.float64), (0, self._padded - share.size))
            came = np.repeat(mask, GRANULE)[: self._padded]
            for begin, n, key in self._blocks:
                at = slice(begin, begin + n)
                total[at] += came[at] * rotate(padded[at], key)
            count += came
        return total / np.maximum(count, 1)

    def check(self, values: np.ndarray, mean: np.ndarray, held: np.ndarray) -> None:
        came = np.repeat(held, GRANULE)[: self._padded]
        expected = np.zeros(self._padded)
        for begin, n, key in self._blocks:
            at = slice(begin, begin + n)
            scale = min(MOST_UNBIASING, n / max(1, came[at].sum()))
            expected[at] = scale * rotate_back(mean[at] * came[at], key)
            assert came[at].any() or not values[at].any(), "not zero where nothing came"
        if self._checked:
            error = values - expected[: self._length]
            # Of the mean, and of contributions of unit variance, which may cancel.
            tolerance = 1e-6 * (expected @ expected) + 1e-7 * self._length
            assert error @ error <= tolerance, "not the mean of what came"

    def comparable(self, values: np.ndarray, held: np.ndarray) -> dict[int, bytes]:
        return {
            begin: values[begin : begin + n].tobytes()
            for begin, n, _ in self._blocks
            if held[begin // GRANULE : (begin + n) // GRANULE].all() and self._checked
        }


VALUES: dict[str, type[RawValues | PlanesValues]] = {"raw": RawValues, "planes": PlanesValues}


class Deliveries:
    """What reached each rank: (seq, stage, source, destination) -> [(time, first, last granule, empty)]."""

    def __init__(self, simulation: Simulation) -> None:
        self._runs: dict[tuple[int, bool, int, int], list[tuple[int, int, int, bool]]] = defaultdict(list)
        self._over: dict[tuple[int, int, int], int] = {}
        ranks = simulation.scenario.ranks
        for packet in rows(simulation.native.deliveries()):
            if packet.over:
                self._over.setdefault((packet.seq, packet.source, packet.destination), packet.at_ns)
            begin, end = _native.shard_range(packet.bucket_len, ranks, packet.shard)
            first_bits = 4 * GRANULE if simulation.scenario.codec == "raw" else 8  # bytes of a granule
            first = packet.first // GRANULE
            if packet.count == 0:
                last = granules_of(end - begin)
            elif packet.empty or packet.payload_bytes == packet.stated_payload_bytes:
                last = first + granules_of(packet.count)
            else:
                last = first + min(granules_of(packet.count), packet.payload_bytes // first_bits)
            run = (packet.at_ns, first, last, packet.empty)
            self._runs[packet.seq, packet.gather, packet.source, packet.destination].append(run)

    def arrived(
        self, seq: int, gather: bool, source: int, destination: int, granules: int, until_ns: int
    ) -> np.ndarray:
        """By granule: whether a value had come by then."""
        arrived, answered = np.zeros(granules, bool), np.zeros(granules, bool)
        for at, first, last, empty in self._runs[seq, gather, source, destination]:
            if at > until_ns:
                continue
            if empty and not gather:  # W10: nothing more is taken from this source
                answered[:] = True
            elif not answered[first:last].any():  # W9: an overlapping run is a duplicate
                answered[first:last] = True
                arrived[first:last] = not empty
        return arrived

    def void_at(self, seq: int, owner: int, ranks: int) -> int | None:
        """When the last of the others told the owner that it had ended the op."""
        times = [self._over.get((seq, rank, owner)) for rank in range(ranks) if rank != owner]
        return None if None in times or not times else max(time for time in times if time is not None)


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
                if owner != rank:
                    granules = granules_of(end - begin)
                    before, by = (
                        deliveries.arrived(seq, True, owner, rank, granules, native.ended_at - tie_ns)
                        for tie_ns in (1, 0)  # what comes with the deadline may come just after it
                    )
                    place = f"op {op} rank {rank} shard {shard}"
                    assert (held <= by).all(), f"{place}: holds what did not come"
                    assert (held >= before).all(), f"{place}: lacks what came"
                values = VALUES[scenario.codec](scenario, seq, shard, end - begin)
                if owner in means:
                    values.check(result[begin:end], means[owner], held)
                else:  # the owner died without a report: at least all agree on what it sent
                    for at, part in values.comparable(result[begin:end], held).items():
                        assert part == unverified.setdefault((shard, at), part)


def _check_contributions(
    simulation: Simulation, op: int, deliveries: Deliveries, natives: list
) -> dict[int, np.ndarray]:
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
        masks = []
        for rank in range(scenario.ranks):
            if rank == owner:
                entered = native.entered_at <= native.closed_at and native.contributed
                came = np.full(granules, entered)
            else:
                before, came = (
                    deliveries.arrived(seq, False, rank, owner, granules, native.closed_at - tie_ns)
                    for tie_ns in (1, 0)  # what comes as SCATTER closes may come just after it
                )
                if (before <= used[rank]).all() and (used[rank] <= came).all():
                    came = used[rank]
            masks.append(came)
        if end > begin and deliveries.void_at(seq, owner, scenario.ranks) == native.closed_at:
            # The others had all ended: each granule was final by then, with what had come, or is nobody's.
            for g in range(granules):
                users = [u[g] for u in used]
                assert not any(users) or users == [m[g] for m in masks], f"op {op} owner {owner}: granule {g}"
            masks = used
        for rank in range(scenario.ranks):
            same = end == begin or np.array_equal(used[rank], masks[rank])
            assert same, f"op {op} owner {owner}: contribution of rank {rank}"
        values = VALUES[scenario.codec](scenario, seq, native.own_shard, end - begin)
        means[owner] = values.mean([bucket[begin:end] for bucket in simulation.inputs[op]], masks)
    return means


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
