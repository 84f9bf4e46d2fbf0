"""What a figure depends on besides the code: the machine, its limits, and how fast it copies memory."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import numpy as np

_COPY_BYTES = 64 << 20
_COPY_ROUNDS = 5


def cores() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def describe() -> dict[str, str | int]:
    """The facts that are stored with figures."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "receive_buffer_limit_bytes": int(Path("/proc/sys/net/core/rmem_max").read_text()),
    }
    for package in ("tailcut", "numpy", "torch"):
        with suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts


def memcpy_bytes_per_s(threads: int) -> float:
    """How many bytes ``threads`` threads together copy per second, from and to memory. The best of a few."""
    pairs = [
        (np.ones(_COPY_BYTES // 4, np.float32), np.ones(_COPY_BYTES // 4, np.float32)) for _ in range(threads)
    ]
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_COPY_ROUNDS):
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), pairs))  # numpy copies without the GIL
            best_s = min(best_s, time.perf_counter() - start)
    return threads * _COPY_BYTES / best_s


def busbw_ceiling(ranks: int, copied_bytes_per_s: float) -> float:
    """The busbw at which local ranks would do nothing but copy.

    Each rank sends 2(n-1)/n of the bucket. Every byte is copied into the kernel and out of it. So n ranks
    together copy 4(n-1) buckets.
    """
    return copied_bytes_per_s / (2 * ranks)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
