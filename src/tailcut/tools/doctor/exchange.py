"""What ranks tell each other through the store. Every wait has an end.

Keys carry the name of their run, so that what an earlier run left in the store is not read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from tailcut.store import Store, try_get

PAUSE_S = 0.02
_RUN_KEY = "tailcut-doctor/run"


def begin_run(store: Store, run: str) -> None:
    """Rank 0 names the run, before it meets the others."""
    store.set(_RUN_KEY, run.encode())


def current_run(store: Store) -> str | None:
    """The name that rank 0 has given the run. Until rank 0 is there, it is the name of an earlier run."""
    value = try_get(store, _RUN_KEY)
    return None if value is None else value.decode()


class Exchange:
    """The values of one run. Each rank writes one for each topic, as JSON."""

    def __init__(self, store: Store, run: str, rank: int) -> None:
        self._store = store
        self._run = run
        self._rank = rank

    def publish(self, topic: str, value: object) -> None:
        self._store.set(self._key(topic, self._rank), json.dumps(value).encode())

    def get(self, topic: str, rank: int) -> Any | None:
        value = try_get(self._store, self._key(topic, rank))
        return None if value is None else json.loads(value)

    def missing(self, topic: str, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if self.get(topic, rank) is None]

    def collect(self, topic: str, ranks: Iterable[int], patience_s: float) -> dict[int, Any]:
        """The values of those ranks that publish in time."""
        give_up = time.monotonic() + patience_s
        values: dict[int, Any] = {}
        waiting = list(ranks)
        while True:
            values |= {rank: value for rank in waiting if (value := self.get(topic, rank)) is not None}
            waiting = [rank for rank in waiting if rank not in values]
            if not waiting or time.monotonic() >= give_up:
                return values
            time.sleep(PAUSE_S)

    def _key(self, topic: str, rank: int) -> str:
        return f"tailcut-doctor/{self._run}/{topic}/{rank}"
