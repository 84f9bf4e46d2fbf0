"""An independent account of a simulated run: from what the network delivered to what every rank must hold.

Reads the record of deliveries and the times at which SCATTER closed and ops ended; computes contributions and
results in plain NumPy. Shares no code with the protocol core.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tailcut import Report, Simulation, _native

GRANULE = 64


def granules_of(length: int) -> int:
    return max(1, -(-length // GRANULE))


def rank_order_mean(contributions: list[np.ndarray]) -> np.ndarray:
    total = contributions[0].copy()
    for contribution in contributions[1:]:
        total += contribution
    return total / np.float32(len(contributions))


class Deliveries:
    """What reached each rank: (seq, stage, source, destination) -> [(time, first, last granule, empty)]."""

    def __init__(self, simulation: Simulation) -> None:
        self._runs: dict[tuple[int, bool, int, int], list[tuple[int, int, int, bool]]] = defaultdict(list)
        self._over: dict[tuple[int, int, int], int] = {}
        ranks = simulation.scenario.ranks
        for line in simulation.native.deliveries:
            at, source, destination, seq, gather, empty, shard, first, count, payload, length, over = line
            if over:
                self._over.setdefault((seq, source, destination), at)
            begin, end = _native.shard_range(length, ranks, shard)
            whole = payload == 4 * count
            if count == 0:
                last = granules_of(end - begin)
            elif empty or whole:
                last = first // GRANULE + granules_of(count)
            else:
                last = first // GRANULE + payload // (4 * GRANULE)
            run = (at, first // GRANULE, last, bool(empty))
            self._runs[seq, bool(gather), source, destination].append(run)

    def arrived(
        self, seq: int, gather: bool, source: int, destination: int, granules: int, until_ns: int
    ) -> np.ndarray:
        """By granule: whether a value had come by then."""
        arrived, answered = np.zeros(granules, bool), np.zeros(granules, bool)
        for at, first, last, empty in self._runs[seq, gather, source, destination]:
            if at <= until_ns and not answered[first:last].any():  # W9: an overlapping run is a duplicate
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
        {report.seq: report for report in reports if report.status.name in ("COMPLETE", "DEADLINE")}
        for reports in simulation.native.reports
    ]
    for op in range(scenario.ops):
        seq = scenario.first_seq + op
        means = _check_contributions(simulation, op, deliveries, natives)
        unverified: dict[tuple[int, int], np.ndarray] = {}
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
                    came = deliveries.arrived(
                        seq, True, owner, rank, granules_of(end - begin), native.finished_at
                    )
                    assert np.array_equal(held, came), (
                        f"op {op} rank {rank}: held of shard {shard} is not what came"
                    )
                mask = np.repeat(held, GRANULE)[: end - begin]
                values = result[begin:end]
                assert not values[~mask].any(), (
                    f"op {op} rank {rank}: shard {shard} is not zero where nothing came"
                )
                if owner in means:
                    assert values[mask].tobytes() == means[owner][mask].tobytes(), (
                        f"op {op} rank {rank} shard {shard}"
                    )
                else:  # the owner died without a report: at least all agree on what it sent
                    for g in np.flatnonzero(held):
                        granule = values[g * GRANULE : (g + 1) * GRANULE]
                        first = unverified.setdefault((shard, int(g)), granule)
                        assert granule.tobytes() == first.tobytes()


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
        masks = []
        for rank in range(scenario.ranks):
            if rank == owner:
                entered = native.entered_at <= native.scatter_closed_at and native.contributed
                came = np.full(granules, entered)
            else:
                came = deliveries.arrived(seq, False, rank, owner, granules, native.scatter_closed_at)
            masks.append(came)
        used = [np.frombuffer(contribution, bool) for contribution in native.contributions()]
        if end > begin and deliveries.void_at(seq, owner, scenario.ranks) == native.scatter_closed_at:
            # The others had all ended: each granule was final by then, with what had come, or is nobody's.
            for g in range(granules):
                users = [u[g] for u in used]
                assert not any(users) or users == [m[g] for m in masks], f"op {op} owner {owner}: granule {g}"
            masks = used
        for rank in range(scenario.ranks):
            same = end == begin or np.array_equal(used[rank], masks[rank])
            assert same, f"op {op} owner {owner}: contribution of rank {rank}"
        mean = np.zeros(end - begin, np.float32)
        for g in range(granules):
            at = slice(g * GRANULE, (g + 1) * GRANULE)
            present = [simulation.inputs[op][r][begin:end][at] for r in range(scenario.ranks) if masks[r][g]]
            if present:
                mean[at] = rank_order_mean(present)
        means[owner] = mean
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
            assert native.finished_at <= limit, f"rank {rank}: {outcome}"
