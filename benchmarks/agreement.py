"""Does ``tailcut sim`` predict the testbed? The same ops in both, and the ratio of their times.

    sudo python benchmarks/agreement.py --scenario tail-3 --planes 4,16 --pause 0,0.1 --bounds all,adaptive

Both sides have the same scenario file and seed, so the same bursts come to the same ports at the same times
after the first op. They have the same bucket, planes, pauses and policy. A time is that of one op at one
rank, from its entry to its end, as ``tailcut sim`` counts it; percentiles are over all ranks and all ops
after the warm-up. In a pause a rank sleeps. With the bounds ``all`` an op waits for everything, so that only
the network is compared; with ``adaptive`` it has the bounds of a Group.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import tailcut
from tailcut.tools.sim import Options, run
from tailcut.tools.testbed import HostScenario, Testbed, load_scenario
from tailcut.tools.testbed.privilege import become_root_of_a_namespace

GRADIENTS = 1_590_000
"""Of the workload cnn."""
WAIT_ALL_S = 60.0
"""The deadline of ops that wait for everything."""
START_S = 1.0
"""From the last rank's being ready to the first op, so that the sender of bursts has started."""
LIMIT_S = 600.0
PROC_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    scenario: HostScenario
    planes: int
    pause_s: float
    bounds: str
    """``all`` or ``adaptive``."""
    ops: int
    warmup: int
    count: int

    @property
    def settings(self) -> dict[str, Any]:
        """What both sides take as it is."""
        adaptive = self.bounds == "adaptive"
        deadline_s = tailcut.Config().deadline_s if adaptive else WAIT_ALL_S
        return {"codec": "planes", "planes": self.planes, "adaptive": adaptive, "deadline_s": deadline_s}


@dataclass(frozen=True)
class Measured:
    """What the testbed did. Processor time is that of all cores."""

    times_s: np.ndarray
    """By rank: its ops."""
    elapsed_s: float
    packets: int
    programs_s: float
    """Of the whole machine, ``ranks_s`` included."""
    interrupts_s: float
    ranks_s: float


# ---- the testbed -------------------------------------------------------------------------------------------
def be_rank(rank: int, ranks: int, directory: str, order: dict[str, Any]) -> None:
    config = tailcut.Config(**order["settings"], rendezvous_s=60.0)
    bucket = np.random.default_rng(rank).standard_normal(order["count"], np.float32)
    times_s = []
    with tailcut.Group(rank, ranks, tailcut.FileStore(directory), config) as group:
        print("ready", flush=True)
        start_s = float(sys.stdin.readline())
        time.sleep(max(0.0, start_s - time.monotonic()))
        began_s = time.process_time()
        for _ in range(order["ops"]):
            time.sleep(order["pause_s"])
            entered_s = time.perf_counter()
            group.allreduce(bucket, key="gradients").wait()
            times_s.append(time.perf_counter() - entered_s)
        used_s = time.process_time() - began_s
    print(json.dumps({"times_s": times_s, "used_s": used_s}), flush=True)


def on_testbed(case: Case) -> Measured:
    order = {"settings": case.settings, "count": case.count, "ops": case.ops, "pause_s": case.pause_s}
    with Testbed.up(case.scenario) as testbed, tempfile.TemporaryDirectory() as directory:
        ranks = len(testbed.hosts)
        argv = (sys.executable, __file__, "--be-rank")
        workers = [
            testbed.spawn(
                rank,
                [*argv, str(rank), str(ranks), directory, json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        for worker in workers:
            assert worker.stdout
            worker.stdout.readline()
        start_s = time.monotonic() + START_S
        testbed.begin_background(start_s)
        for worker in workers:
            assert worker.stdin
            worker.stdin.write(f"{start_s}\n".encode())
            worker.stdin.flush()
        time.sleep(max(0.0, start_s - time.monotonic()))
        busy, packets = processor_s(), switched(testbed)
        outputs = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
        busy, packets = processor_s() - busy, switched(testbed) - packets
        elapsed_s = time.monotonic() - start_s
    if not all(outputs):
        raise SystemExit("agreement: a rank failed; see what it said above")
    heard = [json.loads(output) for output in outputs]
    return Measured(
        times_s=np.array([found["times_s"] for found in heard]),
        elapsed_s=elapsed_s,
        packets=packets,
        programs_s=float(busy[:2].sum()),
        interrupts_s=float(busy[2]),
        ranks_s=sum(found["used_s"] for found in heard),
    )


def processor_s() -> np.ndarray:
    """What all cores have spent so far: in programs, in the kernel for them, and in interrupts."""
    user, nice, system, _, _, hard, soft = map(int, PROC_STAT.read_text().split()[1:8])
    return np.array([user + nice, system, hard + soft]) / os.sysconf("SC_CLK_TCK")


def switched(testbed: Testbed) -> int:
    """How many packets have left the switch, bursts included."""
    return sum(port.packets for port in testbed.counters())


# ---- the simulation ----------------------------------------------------------------------------------------
def simulated(case: Case, cores: int) -> np.ndarray:
    options = Options(
        scenario=case.scenario,
        size_bytes=4 * case.count,
        ops=case.ops,
        warmup=case.warmup,
        compute_s=case.pause_s,
        keyed=True,
        cores=cores,
        **case.settings,
    )
    (row,) = run(options)
    return row.sides["tailcut"].times_s


# ---- the table ---------------------------------------------------------------------------------------------
HEADER = (
    "| scenario | bounds | planes | pause | p50: testbed | simulated | ratio "
    "| p99: testbed | simulated | ratio |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def percentile_ms(times_s: np.ndarray, q: float) -> float:
    return 1e3 * float(np.percentile(times_s, q, method="inverted_cdf"))


def row_of(case: Case, measured_s: np.ndarray, predicted_s: np.ndarray) -> str:
    cells = [case.scenario.name, case.bounds, str(case.planes), f"{1e3 * case.pause_s:g} ms"]
    for q in (50, 99):
        measured, predicted = percentile_ms(measured_s, q), percentile_ms(predicted_s, q)
        cells += [f"{measured:.1f} ms", f"{predicted:.1f} ms", f"{predicted / measured:.2f}"]
    return f"| {' | '.join(cells)} |"


def processor_of(case: Case, measured: Measured) -> str:
    """What a packet really cost. The constant of the simulation is fitted to times and not to this."""
    used_s = measured.programs_s + measured.interrupts_s
    return (
        f"# {case.scenario.name}, {case.planes} planes: {used_s / measured.elapsed_s:.2f} cores busy, "
        f"{1e6 * used_s / measured.packets:.1f} us a packet"
    )


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    parts = itertools.product(
        map(load_scenario, options.scenario.split(",")),
        options.bounds.split(","),
        map(int, options.planes.split(",")),
        map(float, options.pause.split(",")),
    )
    for scenario, bounds, planes, pause_s in parts:
        seeded = scenario if options.seed is None else replace(scenario, seed=options.seed)
        yield Case(seeded, planes, pause_s, bounds, options.ops, options.warmup, options.count)


def measured_in(path: Path) -> Iterator[tuple[Case, Measured]]:
    """What an earlier run has written. Its scenarios are those of today."""
    for entry in json.loads(path.read_text()):
        case = {**entry["case"], "scenario": load_scenario(entry["case"]["scenario"]["name"])}
        seed = entry["case"]["scenario"]["seed"]
        case["scenario"] = replace(case["scenario"], seed=seed)
        values = {name: value for name, value in entry.items() if name != "case"}
        yield Case(**case), Measured(**{**values, "times_s": np.array(values["times_s"])})


def compare(options: argparse.Namespace) -> None:
    now = ((case, on_testbed(case)) for case in cases_of(options))
    found = []
    print(HEADER, flush=True)
    for case, measured in measured_in(options.again) if options.again else now:
        found.append({"case": asdict(case), **asdict(measured)})
        if options.json:
            options.json.write_text(json.dumps(found, default=np.ndarray.tolist))
        counted_s = measured.times_s[:, case.warmup :].ravel()
        print(row_of(case, counted_s, simulated(case, options.cores)), flush=True)
        print(processor_of(case, measured), file=sys.stderr, flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--be-rank"]:
        rank, ranks, directory, order = sys.argv[2:]
        return be_rank(int(rank), int(ranks), directory, json.loads(order))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scenario", default="clean,tail-3,bursts", help="names or files, separated by commas")
    add("--planes", default="4,16")
    add("--pause", default="0,0.1", help="seconds between the end of an op and the next")
    add("--bounds", default="all", help="all, adaptive or both")
    add("--ops", type=int, default=300)
    add("--warmup", type=int, default=20, help="ops that do not count")
    add("--count", type=int, default=GRADIENTS, help="coordinates of the bucket")
    add("--cores", type=int, default=2, help="of this machine, for the simulation")
    add("--seed", type=int, help="instead of the scenario's")
    add("--json", type=Path, help="write what was measured to this file")
    add("--again", type=Path, metavar="FILE", help="simulate what --json has written, and measure nothing")
    options = parser.parse_args()
    if not options.again:
        become_root_of_a_namespace()
    return compare(options)


if __name__ == "__main__":
    main()
