"""The numbers by which the core knows the keys of buckets: the same on every rank."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Hashable

_NUMBERS = 1 << 32


class Keys:
    """Gives each key a number of its own. Ranks use keys for the first time in the same order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}

    def number_of(self, key: Hashable) -> int:
        """The hash of the key, or the next number that is free if another key has that. 0 only for None."""
        if key is None:
            return 0
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                number = hash_of(key)
                while number == 0 or number in self._keys:
                    number = (number + 1) % _NUMBERS
                self._numbers[key] = number
                self._keys[number] = key
            return number


def hash_of(key: Hashable) -> int:
    """Not Python's own, which is another one in every process."""
    return zlib.crc32(repr(key).encode())
