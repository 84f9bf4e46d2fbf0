"""What the transport promises on networks it has never seen: the real core and policies in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tailcut import Freeze, Hang, Scenario, Simulation, _native, simulate
from tailcut.policy.steering import Steering
from tailcut.simulation import Baseline, simulate_baseline
from tailcut.simulation.network import Bursts, NeighbourFlows, RateChange
from tailcut.tools.sim import Options, run
from tailcut.tools.sim.figures import Side
from tailcut.tools.testbed import HostScenario, load_scenario, parse_scenario

RATE = 25e6  # bytes/s, of the testbed's ports
FRAME_BYTES, PACKET_BYTES = 42, 1424


def sides(scenario: str | HostScenario, **options: object) -> dict[str, Side]:
    described = load_scenario(scenario) if isinstance(scenario, str) else scenario
    (row,) = run(Options(scenario=described, **{"size_bytes": 1 << 20, "ops": 200} | options))
    return row.sides


def group(**fields: object) -> Scenario:
    """Ports of 200 Mbit/s, bounds that adapt, no values."""
    given = {
        "ranks": 4,
        "length": 1 << 18,
        "deadline_s": 5.0,
        "bytes_per_s": RATE,
        "queue_bytes": 8_000_000,
        "frame_bytes": FRAME_BYTES,
        "packet_bytes": PACKET_BYTES,
        "socket_buffer_bytes": 8 << 20,
        "pool_bytes": 1 << 28,
        "paced": True,
        "steering": True,
        "elided": True,
    }
    return Scenario(**given | fields)


def payload_bound_s(ranks: int, size_bytes: int) -> float:
    framed = (PACKET_BYTES + _native.HEADER_BYTES + FRAME_BYTES) / PACKET_BYTES
    return 2 * (ranks - 1) / ranks * size_bytes * framed / RATE


def elapsed_s(simulation) -> np.ndarray:
    """[op][rank]"""
    ranks = range(simulation.scenario.ranks)
    return np.array([[report.elapsed_s for report in simulation.reports(rank)] for rank in ranks]).T


def test_a_clean_network_is_filled_and_nothing_is_given_up_in_a_thousand_ops() -> None:
    tailcut = sides("clean", size_bytes=2 << 20, ops=1000)["tailcut"]
    assert np.median(tailcut.times_s) < 1.1 * payload_bound_s(4, 2 << 20)
    assert tailcut.delivered == 1.0


RARE_BURSTS = """
hosts = 8
[port]
queue_bytes = 48_000_000
[bursts]
burst_bytes = 23_200_000
gap_min_s = 1
gap_mean_s = 380
"""
"""On the wire twice what an op of 6.8 MB brings to a port; somewhere once in a hundred ops."""


@pytest.mark.long
def test_bursts_of_other_traffic_do_not_reach_the_ops() -> None:
    rare = parse_scenario(RARE_BURSTS, "rare-bursts")
    both = sides(rare, size_bytes=6_815_744, ops=300, warmup=20, against=("ring",))
    tailcut, ring = both["tailcut"], both["ring"]
    assert np.percentile(tailcut.times_s, 99) <= 1.2 * np.median(tailcut.times_s)
    assert tailcut.delivered >= 0.98
    assert np.percentile(ring.times_s, 99) >= 2.5 * np.median(ring.times_s)


def test_half_of_a_tail_of_3_is_cut_for_ops_of_a_message() -> None:
    """Four ports, each with 80 ms of bursts a second, and 1 MB into each: a third of the ops meets one."""
    both = sides("tail-3", size_bytes=666_668, ops=800, warmup=20, against=("ring",))
    tailcut, ring = both["tailcut"], both["ring"]
    assert ring.tail >= 4
    assert tailcut.tail <= 3
    assert tailcut.percentile_s(99) <= 0.72 * ring.percentile_s(99)
    assert tailcut.percentile_s(50) <= 1.12 * ring.percentile_s(50)
    assert tailcut.delivered >= 0.93


def test_what_bursts_made_late_has_come_by_the_end_of_the_next_op() -> None:
    """If the network rests between ops: a step computes for as long as a burst blocks a port."""
    tailcut = sides("tail-3", size_bytes=666_668, ops=400, warmup=20, compute_s=0.1)["tailcut"]
    assert tailcut.delivered < 0.99
    assert tailcut.by_next_op >= 0.999


def test_a_rank_whose_program_hangs_costs_its_contribution_and_no_more() -> None:
    """Its endpoint serves its shard, where that of a rank that stands still cannot."""
    hung, frozen = (
        simulate(group(ops=60, deadline_s=1.0, **{kind: [cls(1, 1.0, 5.0)]}))
        for kind, cls in (("hangs", Hang), ("freezes", Freeze))
    )

    def lost(simulation: Simulation) -> list[float]:
        """Of its contributions and of its means, at the others while it lasts."""
        links = [
            report.links[1]
            for rank in (0, 2, 3)
            for report, native in zip(simulation.reports(rank), simulation.native.reports[rank], strict=True)
            if 1.5e9 < native.entered_at < 4.5e9
        ]
        return [
            float(np.mean([link.scatter.lost_frac for link in links])),
            float(np.mean([link.gather.lost_frac for link in links])),
        ]

    assert lost(hung) == pytest.approx([1, 0], abs=0.05)
    assert lost(frozen) == pytest.approx([1, 1], abs=0.05)
    entered_s = np.array([report.entered_at for report in hung.native.reports[1]]) / 1e9
    assert np.diff(entered_s).max() == pytest.approx(4.0, abs=0.2)
    assert len(hung.reports(1)) == 60


def test_a_ring_waits_for_a_rank_that_hangs() -> None:
    waiting = Baseline(
        algorithm="ring", ranks=4, bucket_bytes=1 << 20, ops=100, bytes_per_s=RATE, hangs=[Hang(1, 1.0, 5.0)]
    )
    ops = simulate_baseline(waiting).ops()
    assert len(ops) == 400
    longest_s = (ops["ended_at_ns"] - ops["entered_at_ns"]).max() / 1e9
    assert longest_s == pytest.approx(4.0, abs=0.2)


def blocked_ports(**fields: object) -> Simulation:
    """Other traffic blocks each port for 0.8 s now and then; 90 ms of computing before each op."""
    given = {
        "ops": 150,
        "length": 400_000,
        "codec": "planes",
        "buckets": 1,
        "window_ops": 1024,
        "queue_bytes": 24_000_000,
        "bursts": Bursts(volume_bytes=20_000_000, gap_min_s=2.0, gap_mean_s=4.0),
    }
    scenario = group(**given | fields)
    return simulate(replace(scenario, compute_s=[[0.09] * scenario.ranks] * scenario.ops))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_rank_whose_port_is_blocked_goes_on_sending(seed: int) -> None:
    """It hears nobody, and its contributions reach the others. It enters ever later, so that some of them
    come late: 37 and 29 %."""
    simulation = blocked_ports(seed=seed)
    reports = [{report.seq: report for report in simulation.reports(rank)} for rank in range(4)]
    lost = []
    for rank, own in enumerate(reports):
        others = [peer for peer in range(4) if peer != rank]
        deaf = [s for s, report in own.items() if all(report.links[p].gather.lost_frac == 1 for p in others)]
        lost += [reports[p][s].links[rank].scatter.lost_frac for p in others for s in deaf if s > 30]
    assert len(lost) > 50
    assert np.mean(lost) < 0.5


NEIGHBOURS = NeighbourFlows(flow_bytes=5_000_000, gap_mean_s=0.8)


def neighbours(seed: int = 0, **fields: object) -> Simulation:
    """Two short ops, 100 s apart."""
    pause = [[0.0] * 4, [100.0] * 4]
    return simulate(group(length=1, ops=2, seed=seed, compute_s=pause, neighbours=NEIGHBOURS, **fields))


def test_neighbours_come_and_go_over_every_port() -> None:
    counted = neighbours().native.network
    seconds_alone = 5e6 / RATE * (1448 + 66) / 1448
    flows = 4 * 100 / (0.8 + seconds_alone)
    packets = math.ceil(5e6 / 1448) * 1.5  # an ack for every second one
    assert counted.neighbour_packets == pytest.approx(flows * packets, rel=0.1)
    assert counted.neighbour_drops == 0
    assert sum(counted.fates.values()) < 1000  # those of the ranks alone


def test_neighbours_follow_the_seed() -> None:
    one, again, other = (neighbours(seed).native.network.neighbour_packets for seed in (0, 0, 1))
    assert one == again != other


def test_neighbours_do_not_keep_a_simulation_going() -> None:
    dead = neighbours(freezes=[Freeze(2, 1.0, None)])
    assert 100 < dead.ended_s < 120


def test_the_link_is_shared_with_neighbours() -> None:
    """They are there for a third of the time, and ops go on beside them."""
    alone, beside = (sides(name, size_bytes=2 << 20, ops=200)["tailcut"] for name in ("clean", "neighbours"))
    assert beside.delivered > 0.98
    assert 1.1 < beside.times_s.mean() / alone.times_s.mean() < 2


def test_eight_senders_into_one_port_of_150_kb_lose_next_to_nothing() -> None:
    tailcut = sides("incast", ranks=(9,), size_bytes=2 << 20, ops=60)["tailcut"]
    assert tailcut.losses.queue <= 0.01
    assert np.median(tailcut.times_s) <= 1.15 * payload_bound_s(9, 2 << 20)
    assert tailcut.delivered == pytest.approx(1, abs=1e-4)


def test_a_lossy_link_with_time_to_spare_delivers_everything_at_no_cost_in_time() -> None:
    clean, lossy = (sides(name, size_bytes=4 << 20, ops=60)["tailcut"] for name in ("clean", "lossy-1"))
    assert lossy.delivered > 0.9999
    assert np.median(lossy.times_s) < 1.1 * np.median(clean.times_s)


@pytest.mark.parametrize("slower", [5, 10])
def test_bounds_follow_a_link_that_becomes_slower_and_recovers_within_20_ops(slower: int) -> None:
    """Rank 1's link, both ways, after 40 ops; until the group has done 80."""
    ops, from_op, until_op = 140, 40, 80
    clean = simulate(group(ops=ops))
    usual_s = float(np.median(elapsed_s(clean)))
    slow_from_s = from_op * usual_s
    slow_for_s = (until_op - from_op) * slower * usual_s
    changes = [
        RateChange(slow_from_s, 1, 1 / slower, 1 / slower),
        RateChange(slow_from_s + slow_for_s, 1),
    ]
    simulation = simulate(group(ops=ops, deadline_s=20.0, rate_changes=changes))
    lost = np.array([[r.lost_frac for r in simulation.reports(rank)] for rank in range(4)]).T.max(axis=1)
    entered_s = np.array([r.entered_at / 1e9 for r in simulation.native.reports[0]])
    slow = (entered_s > slow_from_s) & (entered_s < slow_from_s + slow_for_s)
    first, after = np.flatnonzero(slow)[0], np.flatnonzero(slow)[-1] + 1
    assert np.mean(lost[first + 20 : after - 1]) < 0.01  # it has been waited for
    assert np.median(elapsed_s(simulation)[after + 20 :]) < 1.12 * usual_s
    assert not lost[after + 20 :].any()


def test_a_rank_that_is_slower_at_times_does_not_slow_the_others() -> None:
    """Five times slower in a tenth of its steps."""
    ops, ranks, compute_s = 200, 4, 0.05
    steady = np.full((ops, ranks), compute_s)
    straggling = steady.copy()
    straggling[np.random.default_rng(1).random(ops) < 0.1, 1] *= 5
    seconds = []
    for compute in (steady, straggling):
        simulation = simulate(group(ops=ops, ranks=ranks, compute_s=compute))
        finished_s = [report.ended_at / 1e9 for report in simulation.native.reports[0]]
        seconds.append((finished_s[-1] - finished_s[20]) / (ops - 21))
    assert seconds[1] < 1.1 * seconds[0]


class Fixed:
    """One bound of SCATTER for all ops."""

    def __init__(self, scatter_s: float) -> None:
        ns = round(1e9 * scatter_s)
        never = 10**10
        bounds = _native.Bounds(ns, never, never, never, never, never)
        self._terms = _native.Terms(bounds, 16)

    def terms(self, length: int) -> _native.Terms:
        return self._terms

    def after(self, report: object, now_s: float) -> None:
        pass


def test_most_contributions_are_used_when_compute_times_vary() -> None:
    """Lognormal, sigma 0.3, and a t_B of 0.8 of their mean: a clock started by the fastest would use few."""
    ops, ranks, mean_s = 100, 8, 0.1
    sigma = 0.3
    times = np.random.default_rng(3).lognormal(np.log(mean_s) - sigma**2 / 2, sigma, (ops, ranks))
    scenario = group(ops=ops, ranks=ranks, length=1 << 12, compute_s=times, deadline_s=10.0, steering=False)
    simulation = simulate(scenario, policies=[Fixed(0.8 * mean_s)] * ranks)
    lost = [
        report.scatter.missing / report.scatter.coords
        for rank in range(ranks)
        for report in simulation.reports(rank)
    ]
    assert 1 - np.mean(lost) >= 0.75


class Watched(Steering):
    """As a Group decides, or a fixed number of senders at once (0: no limit); keeps what it advertised."""

    fixed: int | None = None

    def __init__(self, rank: int, scenario: Scenario) -> None:
        super().__init__(rank=rank, members=range(scenario.ranks), deadline_s=scenario.deadline_s)
        self.advertised: list[int] = []

    @property
    def incast(self) -> int:
        return super().incast if self.fixed is None else self.fixed

    def terms(self, length: int) -> _native.Terms:
        self.advertised.append(self.incast or 31)
        return _native.Terms(self.native_bounds(length), 16, self.incast)


class OneAtOnce(Watched):
    fixed = 1


class AllAtOnce(Watched):
    fixed = 0


def small_ports(ops: int, **fields: object) -> Scenario:
    """32 ranks, 9,000-byte frames, ports of 100 kB, which hold eleven; 20 ms of computing before each op."""
    given = {
        "ranks": 32,
        "length": 1 << 20,
        "ops": ops,
        "seed": 11,
        "deadline_s": 10.0,
        "delay_s": 25e-6,
        "compute_s": np.random.default_rng(11).lognormal(np.log(0.02), 0.02, (ops, 32)),
        "bytes_per_s": 125e6,
        "queue_bytes": 100_000,
        "packet_bytes": 8704,
    }
    return group(**given | fields)


def steered(scenario: Scenario, kind: type[Watched]) -> tuple[np.ndarray, np.ndarray]:
    """Times by op and rank, and the least number of senders that anybody asked for in each op."""
    policies = [kind(rank, scenario) for rank in range(scenario.ranks)]
    times_s = elapsed_s(simulate(scenario, policies=policies))
    return times_s, np.min([policy.advertised for policy in policies], axis=0)


def test_on_small_ports_the_advertised_number_beats_one_and_all_at_once() -> None:
    """Several seeds: benchmarks/incast.py. A few ops are enough to see how slow one at once is."""
    times_s, advertised = steered(small_ports(50), Watched)
    all_s, _ = steered(small_ports(50), AllAtOnce)
    one_s, _ = steered(small_ports(8), OneAtOnce)
    for fixed_s in (one_s[4:], all_s[25:]):
        assert times_s[25:].mean() < 0.95 * fixed_s.mean()
        assert np.median(times_s[25:]) < 0.9 * np.median(fixed_s)
    assert advertised[0] == 31
    assert 12 <= advertised[-1] <= 15


def test_the_advertised_number_falls_with_loss_and_rises_without() -> None:
    """Buckets of 4 MB, then some that leave a port room."""
    large, ops = 32, 100
    small = {(op, rank): 1 << 14 for op in range(large, ops) for rank in range(32)}
    _, advertised = steered(small_ports(ops, lengths=small), Watched)
    assert advertised[0] == 31
    assert advertised[large] <= 15
    assert advertised[-1] >= advertised[large] + 5
