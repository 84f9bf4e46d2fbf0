"""Rendezvous without torch: keys as files in a directory that every rank sees."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from tailcut.errors import ConfigError


class Store(Protocol):
    """Where ranks find each other: a FileStore, a torch Store, or anything with these methods.

    ``get`` may block or raise if the key is not there yet. A store that also has torch's
    ``check(keys) -> bool`` is asked that first.
    """

    def set(self, key: str, value: bytes, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...


class ComparingStore(Store, Protocol):
    """A store through which ranks can also agree (docs/epochs.md)."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set the key to ``desired`` if its value is ``expected``, or if there is none and ``expected`` is
        empty, as one step. Returns the value after that; ``expected`` if there is none."""
        ...


def try_get(store: Store, key: str) -> bytes | None:
    """The value of the key, or None if it is not there yet."""
    check = getattr(store, "check", None)
    if check is not None and not check([key]):
        return None
    with suppress(LookupError, TimeoutError):
        return store.get(key)
    return None


class FileStore:
    """A directory as a store. A key is written whole or not at all."""

    def __init__(self, directory: str | os.PathLike[str], *, timeout_s: float = 300.0) -> None:
        self._directory = Path(directory)
        self._timeout_s = timeout_s
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"FileStore cannot use {self._directory}: {error.strerror}") from error

    def _path(self, key: str) -> Path:
        return self._directory / quote(key, safe="")

    def set(self, key: str, value: bytes) -> None:
        """Write a key, or replace it."""
        handle, name = tempfile.mkstemp(dir=self._directory, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(value)
            os.replace(name, self._path(key))
        except BaseException:
            os.unlink(name)
            raise

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set the key to ``desired`` if its value is ``expected``, or if there is none and ``expected`` is
        empty, as one step. Returns the value after that; ``expected`` if there is none."""
        with open(self._directory / ".compare_set", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file, and with a process that dies
            present = try_get(self, key)
            if present is None and expected:
                return expected.encode()
            if present is not None and present != expected.encode():
                return present
            self.set(key, desired.encode())
        return desired.encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """Read a key; wait for it at most ``timeout_s``."""
        give_up = time.monotonic() + self._timeout_s
        pause_s = 0.001
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() >= give_up:
                    raise TimeoutError(
                        f"no {key!r} in {self._directory} after {self._timeout_s:g} s"
                    ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
