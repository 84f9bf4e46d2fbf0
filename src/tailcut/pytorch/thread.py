"""A thread that works off a queue for an object, and does not keep it alive."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Owner = TypeVar("Owner")


def start(
    name: str, work: queue.SimpleQueue[Any], handle: Callable[[Owner, Any], None], owner: Owner
) -> threading.Thread:
    """A thread that handles what is queued, until None comes. It does not keep an idle owner alive."""
    there = weakref.ref(owner)

    def run() -> None:
        while (item := work.get()) is not None:
            if (alive := there()) is not None:
                handle(alive, item)
            del alive, item

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
