"""How fast is GATHER by multicast, and how fast by unicast, where hosts have little uplink?

There is one process per host of a testbed. By unicast a rank sends its contributions first, so the close of
its shard ends SCATTER, and the rest of the op is GATHER. By multicast means go out while contributions are
still being sent, and both share the uplink. There, GATHER is what the op takes beyond SCATTER of the unicast
ops in the same round. Rounds are in pairs that take turns at going first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

import numpy as np

import tailcut
from tailcut.tools.testbed import HostScenario, Testbed
from tailcut.tools.testbed.scenario import Port

WARM_UP_OPS = 3
LIMIT_S = 600


def be_rank(rank: int, ranks: int, directory: str, mode: str, ops: int, count: int) -> None:
    config = tailcut.Config(multicast=mode, deadline_s=60.0, adaptive=False, rendezvous_s=60.0, codec="raw")
    lines = []
    with tailcut.Group(rank, ranks, tailcut.FileStore(directory), config) as group:
        for _ in range(WARM_UP_OPS + ops):
            bucket = np.full(count, rank, np.float32)
            report = group.allreduce(bucket).wait()
            if report.status != "complete" or not (bucket == (ranks - 1) / 2).all():
                raise SystemExit(f"rank {rank}: wrong result: {report}")
            sent_bytes, resent_packets = report.traffic.sent_bytes, report.traffic.resent_packets
            lines.append((report.elapsed_s, report.scatter.ended_s, sent_bytes, resent_packets))
        stats = group.stats()
    print(json.dumps({"ops": lines[WARM_UP_OPS:], "rejected": stats.rejected}), flush=True)


def run(testbed: Testbed, ranks: int, mode: str, ops: int, count: int) -> dict[str, float]:
    """Medians over the ops, taking the slowest rank in each."""
    with tempfile.TemporaryDirectory() as directory:
        workers = [
            testbed.spawn(
                rank,
                [
                    *(sys.executable, __file__, "--be-rank", str(rank), str(ranks), directory),
                    *(mode, str(ops), str(count)),
                ],
                stdout=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        outputs = [json.loads(worker.communicate(timeout=LIMIT_S)[0]) for worker in workers]
    by_op = list(zip(*(output["ops"] for output in outputs), strict=True))
    return {
        "elapsed_s": statistics.median(max(line[0] for line in op) for op in by_op),
        "scatter_s": statistics.median(max(line[1] for line in op) for op in by_op),
        "sent_bytes": statistics.median(sum(line[2] for line in op) for op in by_op),
        "resent_packets": sum(line[3] for op in by_op for line in op),
        "duplicates": sum(output["rejected"].get("duplicate", 0) for output in outputs),
    }


def compare(options: argparse.Namespace) -> None:
    port = Port(rate_mbit_s=options.port_mbit_s, uplink_mbit_s=options.uplink_mbit_s, mtu_bytes=options.mtu)
    mean_bytes = 4 * options.count / options.hosts
    ratios = []
    with Testbed.up(HostScenario(name="multicast", hosts=options.hosts, port=port)) as testbed:
        for round_number in range(options.rounds):
            modes = ("off", "on") if round_number % 2 == 0 else ("on", "off")
            found = {mode: run(testbed, options.hosts, mode, options.ops, options.count) for mode in modes}
            scatter_s = found["off"]["scatter_s"]
            gather_s = {mode: found[mode]["elapsed_s"] - scatter_s for mode in modes}
            ratios.append(gather_s["off"] / gather_s["on"])
            for mode in ("off", "on"):
                row = found[mode]
                print(
                    f"  multicast {mode:<4}op {1e3 * row['elapsed_s']:7.1f} ms, "
                    f"GATHER {1e3 * gather_s[mode]:7.1f} ms, "
                    f"{8e-6 * mean_bytes / gather_s[mode]:6.1f} Mbit/s to each of {options.hosts - 1}, "
                    f"{row['sent_bytes'] / 1e6:.1f} MB sent, {row['resent_packets']:.0f} packets again, "
                    f"{row['duplicates']:.0f} twice",
                    flush=True,
                )
            print(f"  GATHER is {ratios[-1]:.2f} times faster", flush=True)
    print(
        f"{statistics.median(ratios):.2f} times faster ({min(ratios):.2f}-{max(ratios):.2f}); "
        f"{options.hosts - 1} at most, {0.8 * (options.hosts - 1):.1f} wanted"
    )


def main() -> None:
    if sys.argv[1:2] == ["--be-rank"]:
        rank, ranks, directory, mode, ops, count = sys.argv[2:]
        return be_rank(int(rank), int(ranks), directory, mode, int(ops), int(count))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--ops", type=int, default=20, help="in a run")
    parser.add_argument("--count", type=int, default=1 << 20, help="coordinates per bucket")
    parser.add_argument("--port-mbit-s", type=float, default=1000.0)
    parser.add_argument("--uplink-mbit-s", type=float, default=200.0)
    parser.add_argument("--mtu", type=int, default=1500)
    return compare(parser.parse_args())


if __name__ == "__main__":
    main()
