#!/usr/bin/env python3
"""What a ledger costs a step: ops of three groups of some processes in turns, of which one keeps a ledger.

A step of training is compute and ops; here it is an op and a pause that stands for the compute. Two groups
keep none: what they differ by is noise. The time of the processors is less noisy than that of the clock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from tailcut import FileStore, Group, Ledger


def rank_main(rank: int, options: argparse.Namespace, directory: Path, results: object) -> None:
    kept = directory / "ledger"
    sides = {
        name: Group(rank, options.ranks, FileStore(directory / name), name=name, ledger=ledger)
        for name, ledger in (("without", ""), ("control", ""), ("with", str(kept)))
    }
    took_s: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    values = np.random.default_rng(rank).standard_normal(options.coords, np.float32)
    for step in range(3 * options.steps):
        name = list(sides)[(step + step // 3) % 3]  # none comes always after the same one
        began_s, cpu_s = time.perf_counter(), time.process_time()
        until_s = began_s + options.compute_ms / 1e3
        while time.perf_counter() < until_s:
            np.dot(values[:4096], values[:4096])
        sides[name].allreduce(values.copy(), key="bucket").wait()
        took_s[name].append((time.perf_counter() - began_s, time.process_time() - cpu_s))
    for group in sides.values():
        group.close()
    medians = {
        name: [median(of_kind) for of_kind in zip(*both, strict=True)] for name, both in took_s.items()
    }
    results.put((rank, medians))  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--coords", type=int, default=1_600_000)
    parser.add_argument("--compute-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        workers = [
            context.Process(target=rank_main, args=(rank, options, directory, results))
            for rank in range(options.ranks)
        ]
        for worker in workers:
            worker.start()
        figures = dict(results.get() for _ in workers)
        for worker in workers:
            worker.join()
        ledger = Ledger.open(directory / "ledger")
        files = list((directory / "ledger").iterdir())
        size = sum(file.stat().st_size for file in files) / len(files)
        print(f"{options.ranks} ranks, {options.coords} coordinates, {options.steps} steps each")
        for kind, what in enumerate(("a step", "processor time of a step")):
            without, control, with_it = (
                1e3 * median(figure[side][kind] for figure in figures.values())
                for side in ("without", "control", "with")
            )
            print(
                f"{what}: without {without:.2f} ms, "
                f"without again {control:.2f} ms ({control / without - 1:+.2%}), "
                f"with a ledger {with_it:.2f} ms ({2 * with_it / (without + control) - 1:+.2%})"
            )
        print(f"{size / len(ledger.ranks[0].ops):.0f} bytes an op, with the head of the file")


if __name__ == "__main__":
    main()
