"""How many senders at once on a switch with small ports: fixed numbers against the adaptive one.

Everything is in virtual time: figures are the same on every machine. All arms have the same pacing, bounds,
compute times and seeds; only the number that receivers advertise differs. The defaults give the table of
docs/time.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tailcut import Scenario, _native, simulate
from tailcut.policy.steering import Steering
from tailcut.tools.cli.sizes import size_bytes

PAYLOAD_BYTES = {1500: 1408, 9000: 8704}
FRAME_BYTES = 42


class Dynamic(Steering):
    """Decides as a Group does, and keeps the numbers that it advertised."""

    def __init__(self, *, rank: int, ranks: int, deadline_s: float, planes: int) -> None:
        super().__init__(rank=rank, members=range(ranks), deadline_s=deadline_s)
        self._planes = planes
        self.advertised: list[int] = []

    def terms(self, length: int) -> _native.Terms:
        self.advertised.append(self.incast)
        return _native.Terms(self.native_bounds(length), self._planes, self.incast)


class FixedIncast(Dynamic):
    """Decides as a Group does, except for the number of senders."""

    senders = 0

    @property
    def incast(self) -> int:
        return self.senders


@dataclass(frozen=True)
class Figures:
    """The figures of one run. Times are of all ranks and all ops after the warm-up."""

    times_s: npt.NDArray[np.float64]
    dropped: float
    """Share of all packets that full ports dropped."""
    delivered: float
    least: list[int]
    """The least number advertised, by op: the one that senders follow."""


def scenario(arguments: argparse.Namespace, seed: int) -> Scenario:
    shape = (arguments.ops, arguments.ranks)
    spread = arguments.spread
    compute = np.random.default_rng(seed).lognormal(-(spread**2) / 2, spread, shape)
    return Scenario(
        ranks=arguments.ranks,
        length=arguments.size // 4,
        ops=arguments.ops,
        seed=seed,
        deadline_s=arguments.deadline,
        delay_s=arguments.rtt * 1e-6 / 2,
        compute_s=(arguments.compute * 1e-3 * compute).tolist(),
        bytes_per_s=arguments.rate * 1e6 / 8,
        queue_bytes=arguments.queue,
        frame_bytes=FRAME_BYTES,
        packet_bytes=PAYLOAD_BYTES[arguments.mtu],
        socket_buffer_bytes=8 << 20,
        pool_bytes=1 << 28,
        codec=arguments.codec,
        paced=not arguments.unpaced,
        elided=True,
    )


def measure(given: Scenario, senders: int | None, warmup: int) -> Figures:
    """Runs with this many senders at once in every op; None: as many as the policy decides."""
    policies: list[Dynamic] = []
    for rank in range(given.ranks):
        kind = Dynamic if senders is None else FixedIncast
        policy = kind(rank=rank, ranks=given.ranks, deadline_s=given.deadline_s, planes=given.planes)
        if isinstance(policy, FixedIncast):
            policy.senders = 0 if senders is None or senders >= given.ranks - 1 else senders
        policies.append(policy)
    simulation = simulate(given, policies=policies)
    reports = [simulation.reports(rank)[warmup:] for rank in range(given.ranks)]
    lost = np.mean([[report.lost_frac for report in ops] for ops in reports])
    missing = np.mean([[report.scatter.missing / report.scatter.coords for report in ops] for ops in reports])
    sent = sum(counters.traffic.sent_packets for counters in simulation.native.counters)
    limits = [[n or given.ranks - 1 for n in policy.advertised] for policy in policies]
    return Figures(
        np.array([[report.elapsed_s for report in ops] for ops in reports]),
        simulation.native.fates["queue_drop"] / sent,
        float((1 - lost) * (1 - missing)),
        np.min(limits, axis=0).tolist(),
    )


def spread_of(values: Sequence[float]) -> str:
    return f"{np.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--senders", default="1,8,16,31", metavar="I[,I...]", help="fixed numbers at once")
    parser.add_argument("--ranks", type=int, default=32, metavar="N")
    parser.add_argument("--size", type=size_bytes, default=4 << 20, metavar="SIZE", help="of a bucket")
    parser.add_argument("--rate", type=float, default=1000.0, metavar="MBIT/S")
    parser.add_argument("--queue", type=size_bytes, default=100_000, metavar="SIZE", help="of a switch port")
    parser.add_argument("--mtu", type=int, choices=PAYLOAD_BYTES, default=9000)
    parser.add_argument("--rtt", type=float, default=50.0, metavar="US")
    parser.add_argument("--compute", type=float, default=20.0, metavar="MS", help="before every op")
    parser.add_argument("--spread", type=float, default=0.02, help="of compute times, lognormal")
    parser.add_argument("--codec", choices=("raw", "planes"), default="raw")
    parser.add_argument("--unpaced", action="store_true", help="credit alone, no pacing, in all arms")
    parser.add_argument("--deadline", type=float, default=10.0, metavar="S")
    parser.add_argument("--ops", type=int, default=60, metavar="N")
    parser.add_argument("--warmup", type=int, default=25, metavar="N")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--first-seed", type=int, default=11)
    arguments = parser.parse_args()
    print("Times in ms: the median (least-most) over seeds.")
    columns = ("P50", "P99", "mean", "dropped (%)", "delivered (%)")
    print(f"{'senders':>8}" + "".join(f"{column:>26}" for column in columns), flush=True)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    for senders in (*map(int, arguments.senders.split(",")), None):
        runs = [measure(scenario(arguments, seed), senders, arguments.warmup) for seed in seeds]
        cells = [
            *(spread_of([1e3 * float(np.percentile(run.times_s, q)) for run in runs]) for q in (50, 99)),
            spread_of([1e3 * float(run.times_s.mean()) for run in runs]),
            spread_of([100 * run.dropped for run in runs]),
            spread_of([100 * run.delivered for run in runs]),
        ]
        name = "dynamic" if senders is None else str(senders)
        print(f"{name:>8}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
        if senders is None:
            print("senders at once, op by op (first seed):", *runs[0].least)


if __name__ == "__main__":
    main()
