"""Tells all ranks that one of them has received SIGTERM, through the store and without waiting for anybody.

A thread of its own asks the store, because the store may be in the process of a rank that stands still.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

ASK_EVERY_S = 1.0
"""So long after one rank has received SIGTERM the others hear of it."""


class SigtermWatch:
    """Of one rank. ``name`` is that of the process group, the same on all ranks."""

    def __init__(self, store: Any, name: str) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store  # so that others never wait for it
        self._key = f"tailcut/sigterm/{name}"
        self._own = False
        self._wake = threading.Event()
        self._closed = False
        self.received = False
        """Whether some rank has received SIGTERM."""
        self._thread = threading.Thread(target=self._watch, name="tailcut-sigterm", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """This rank has received it. A signal handler may call this."""
        self._own = self.received = True
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(ASK_EVERY_S)  # it may be waiting for a store that is gone

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store is gone: the other ranks end, and so will this one
            while not self.received and not self._closed:
                self._wake.wait(ASK_EVERY_S)
                if not self._own and not self._closed:
                    self.received = self._store.check([self._key])
            if self._own:
                self._store.set(self._key, "1")
