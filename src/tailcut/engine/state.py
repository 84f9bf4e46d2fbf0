"""Blobs of bytes that ranks offer and fetch, reliably and behind everything alive: STATE of the wire format.

Owns nothing but the lane they travel on: a blob goes when it is withdrawn, a fetch when it is taken.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from tailcut import _native

Bytes = npt.NDArray[np.uint8]


class FetchStatus(IntEnum):
    """What became of a fetch."""

    PENDING = 0
    COMPLETE = 1
    ABSENT = 2
    """The server does not offer the blob, or has replaced it meanwhile."""
    TOO_LARGE = 3
    CLOSED = 4


class State:
    """The blobs of one rank. Methods may be called from any thread."""

    def __init__(self, lane: _native.UdpLane) -> None:
        self._lane = lane

    def offer(self, blob_id: int, blob: npt.NDArray[Any]) -> None:
        """Offer a copy of a contiguous array to all ranks, in place of an earlier blob of this id."""
        self._lane.offer(blob_id, blob.reshape(-1).view(np.uint8))

    def withdraw(self, blob_id: int) -> None:
        self._lane.withdraw(blob_id)

    def fetch(self, server: int, blob_id: int, most_bytes: int) -> Fetch:
        """Begin to fetch a blob of at most this length from a rank."""
        return Fetch(self._lane, self._lane.fetch(server, blob_id, most_bytes))

    def take_wanted(self) -> dict[int, int]:
        """By rank: the latest blob of a rejoin that it has asked for in vain since the last call. Such blobs
        have ids from ``_native.REJOIN_IDS`` on, and get a larger share of a busy path than others."""
        return self._lane.take_wanted()


class Fetch:
    """One blob on its way. Dropping it cancels the fetch."""

    def __init__(self, lane: _native.UdpLane, ticket: int) -> None:
        self._lane = lane
        self._ticket = ticket
        self._status = FetchStatus.PENDING
        self.blob: Bytes = np.empty(0, np.uint8)
        """The bytes of a complete one."""

    def poll(self, timeout_ns: int = 0) -> FetchStatus:
        """What became of it so far. Blocks for at most ``timeout_ns``."""
        if self._status is FetchStatus.PENDING:
            status, self.blob = self._lane.take_fetched(self._ticket, timeout_ns)
            self._status = FetchStatus(status)
        return self._status

    def __del__(self) -> None:
        if self._status is FetchStatus.PENDING:
            self._lane.cancel(self._ticket)
