"""How far past its deadline does ``wait()`` return? Two ranks on real sockets, one of them killed.

Nothing can answer the survivor, so each of its ops ends at the deadline. The benchmark measures the engine's
timer, the wake-up of the waiting thread and the call itself. In turns with it, a plain sleep of the same
length shows the machine's own part.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time

import numpy as np

import tailcut


def _be_rank_1(directory: str, config: tailcut.Config) -> None:
    with tailcut.Group(1, 2, tailcut.FileStore(directory), config) as group:
        group.allreduce(np.zeros(1, np.float32)).wait()
        os.kill(os.getpid(), signal.SIGKILL)


def overshoots_s(ops: int, deadline_s: float, count: int) -> tuple[list[float], list[float]]:
    """Seconds past the deadline when ``wait()`` returns, and when a sleep of the same length does."""
    config = tailcut.Config(deadline_s=deadline_s)
    with tempfile.TemporaryDirectory() as directory:
        peer = multiprocessing.get_context("spawn").Process(
            target=_be_rank_1, args=(directory, config), daemon=True
        )
        peer.start()
        with tailcut.Group(0, 2, tailcut.FileStore(directory), config) as group:
            group.allreduce(np.zeros(1, np.float32)).wait()
            peer.join()
            bucket = np.ones(count, np.float32)
            waits, sleeps = [], []
            for _ in range(ops):
                start = time.perf_counter()
                report = group.allreduce(bucket).wait()
                waits.append(time.perf_counter() - start - deadline_s)
                if report.status != "partial":
                    raise SystemExit(f"expected every op to end at the deadline, but: {report}")
                start = time.perf_counter()
                time.sleep(deadline_s)
                sleeps.append(time.perf_counter() - start - deadline_s)
    return waits, sleeps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", type=int, default=2000)
    parser.add_argument("--deadline-ms", type=float, default=20.0)
    parser.add_argument("--count", type=int, default=1 << 16, help="coordinates per bucket")
    options = parser.parse_args()
    waits_s, sleeps_s = overshoots_s(options.ops, options.deadline_ms / 1e3, options.count)
    print(f"{options.ops} ops of {options.count} coordinates, deadline {options.deadline_ms:g} ms, peer dead")
    print(f"{'past the deadline':<20}{'wait()':>12}{'a sleep':>12}")
    for name, q in (("p50", 50), ("p99", 99), ("p99.9", 99.9), ("max", 100)):
        wait_us, sleep_us = (1e6 * np.percentile(v, q, method="inverted_cdf") for v in (waits_s, sleeps_s))
        print(f"  {name:<18}{wait_us:>9.0f} us{sleep_us:>9.0f} us")


if __name__ == "__main__":
    main()
