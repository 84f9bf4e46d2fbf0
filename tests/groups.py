"""Real groups for tests: several ranks in this process, each with its own sockets and engine threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tailcut import Config, FileStore, Group, Report


@contextlib.contextmanager
def open_groups(directory: Path, ranks: int, linger_s: float = 5.0, **config: Any) -> Iterator[list[Group]]:
    def open_one(rank: int) -> Group:
        return Group(rank, ranks, FileStore(directory), Config(**config))

    with ThreadPoolExecutor(ranks) as pool:
        groups = list(pool.map(open_one, range(ranks)))
        try:
            yield groups
        finally:
            list(pool.map(lambda group: group.close(linger_s), groups))


def vectors(ranks: int, length: int, seed: int = 0) -> list[np.ndarray]:
    return [np.random.default_rng((seed, rank)).standard_normal(length, np.float32) for rank in range(ranks)]


def allreduce(groups: list[Group], arrays: list[np.ndarray], **kwargs: Any) -> list[Report]:
    works = [group.allreduce(array, **kwargs) for group, array in zip(groups, arrays, strict=True)]
    return [work.wait() for work in works]
