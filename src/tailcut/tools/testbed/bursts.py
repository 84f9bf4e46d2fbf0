"""Sends bursts of other people's traffic to every port, at seeded times. It runs inside the background's
namespace.

Their destinations do not exist: the frames load the link of a port, and its host does not look at them.
"""

from __future__ import annotations

import heapq
import json
import math
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count

from tailcut import _native

SO_SNDBUFFORCE = 32  # asm-generic/socket.h
SEND_BUFFER_BYTES = 64 << 20
SLICE_PACKETS = 32
"""A burst comes in slices of so many packets: 0.3 ms at 200 Mbit/s. Those to several ports take turns."""
DISCARD_PORT = 9
"""The default trimmable class begins above this port."""


def burst_times(seed: int, ports: int, gap_min_s: float, gap_mean_s: float) -> Iterator[tuple[float, int]]:
    """Yield ``(at_s, port)`` in order, without end. In a simulation of the scenario they are the same."""

    def times(port: int) -> Iterator[tuple[float, int]]:
        at_s = 0.0
        for burst in count():
            at_s += gap_min_s + gap_mean_s * _native.burst_draw(seed, port, burst)
            yield at_s, port

    return heapq.merge(*(times(port) for port in range(ports)))


def slices(
    bursts: Iterator[tuple[float, int]], packets: int, packets_per_s: float
) -> Iterator[tuple[float, int, int]]:
    """Yield ``(at_s, port, packets)`` in order: each burst, cut into slices that come at its rate."""
    waiting: list[tuple[float, int, int]] = []
    for at_s, port in bursts:
        while waiting and waiting[0][0] <= at_s:
            yield heapq.heappop(waiting)
        for first in range(0, packets, SLICE_PACKETS):
            slice_packets = min(SLICE_PACKETS, packets - first)
            heapq.heappush(waiting, (at_s + first / packets_per_s, port, slice_packets))


class Cannon:
    """Sends packets at once. It uses several sockets if one cannot have that much in flight."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def fire(self, address: str, packets: int, payload: bytes) -> None:
        left, place = packets, 0
        while left > 0:
            if place == len(self._sockets):
                self._sockets.append(_large_socket())
            try:
                self._sockets[place].sendto(payload, (address, DISCARD_PORT))
            except BlockingIOError:
                place += 1
            else:
                left -= 1


def _large_socket() -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.setblocking(False)
    with suppress(PermissionError):
        opened.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SEND_BUFFER_BYTES)
    return opened


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])
    addresses = order["addresses"]
    payload = bytes(order["payload_bytes"])
    cannon = Cannon()
    start_s = order.get("start_s") or time.monotonic()
    bursts = burst_times(order["seed"], len(addresses), order["gap_min_s"], order["gap_mean_s"])
    packets = math.ceil(order["burst_bytes"] / order["payload_bytes"])
    for at_s, port, slice_packets in slices(bursts, packets, order["frames_per_s"]):
        time.sleep(max(0.0, start_s + at_s - time.monotonic()))
        cannon.fire(addresses[port], slice_packets, payload)


if __name__ == "__main__":
    main(sys.argv[1:])
