"""The store of a process that torchrun has started, in the form that tailcut uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from tailcut.errors import ConfigError, PeerError
from tailcut.store import Store

try:
    from torch.distributed import rendezvous  # type: ignore[attr-defined]
except ImportError as error:
    raise ConfigError(
        "ranks of torchrun meet in torch's store, and torch is not installed: pip install tailcut[torch], "
        "or give --store, --rank and --world-size"
    ) from error

T = TypeVar("T")


class TorchStore:
    """A torch store that raises PeerError when it fails."""

    def __init__(self, store: Store, where: str) -> None:
        self._store = store
        self._where = where

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: self._store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(
            lambda: bytes(self._store.compare_set(key, expected, desired))  # type: ignore[attr-defined]
        )

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: bool(self._store.check(keys)))  # type: ignore[attr-defined]

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            raise PeerError(
                f"the store at {self._where} does not answer: has rank 0 or its launcher ended?"
            ) from error


def environment_store(timeout_s: float) -> TorchStore:
    """The store that MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE describe, or that of the launcher."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        raise PeerError(f"cannot open the store at {where}: {error}") from error
    return TorchStore(store, where)
