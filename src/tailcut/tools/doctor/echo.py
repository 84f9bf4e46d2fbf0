"""The socket with which a rank pings its peers and answers them, in one loop. Every wait in it is bounded."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tailcut.tools.doctor.ping import COUNT, PATIENCE_S, Ping, Pinger

PING, PONG = b"tailcutP", b"tailcutA"
MESSAGE = struct.Struct("!8sQIII")  # kind, run, from, to, number
PACE_S = 0.002
"""The time between two datagrams of a rank: 30 MB/s at the largest size, 0.7 MB/s at MTU 1500."""

_LARGEST = 65_535
_SO_RCVBUFFORCE = 33  # asm-generic/socket.h; not in the socket module


@dataclass(frozen=True)
class Target:
    """The echo socket of a peer, and the size of the packets that ops send there."""

    address: str
    port: int
    packet_bytes: int


def limit_s(world_size: int) -> float:
    """How long the pings may take: twice as long as on a clean network at this pace, and some patience."""
    return 2 * PACE_S * COUNT * (world_size - 1) + 3 * PATIENCE_S


class Echo:
    """The socket of this rank. A context manager."""

    def __init__(self, address: str, receive_buffer_bytes: int, rank: int, world_size: int, run: int) -> None:
        self._rank = rank
        self._run = run
        self._pingers: dict[int, Pinger] = {}
        self._heard: list[set[int]] = [set() for _ in range(world_size)]
        self._buffer = bytearray(_LARGEST)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        _enlarge(self._socket, receive_buffer_bytes)
        self._socket.bind((address, 0))

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def heard(self) -> list[int]:
        """How many different datagrams came from each rank."""
        return [len(numbers) for numbers in self._heard]

    def ping(self, targets: dict[int, Target]) -> dict[int, Ping]:
        """Ping every target in turn, at the pace, until all have answered or the time is up."""
        self._pingers = {peer: Pinger() for peer in targets}
        # Start after ourselves, so that not all ranks begin with the same peer.
        turns = deque(sorted(targets, key=lambda peer: (peer < self._rank, peer)))
        now = next_at = time.monotonic()
        give_up = now + limit_s(len(self._heard))
        while now < give_up and not all(pinger.finished(now) for pinger in self._pingers.values()):
            if now >= next_at:
                self._send_next(turns, targets, now)
                next_at = now + PACE_S
            self._listen(next_at - now)
            now = time.monotonic()
        return {
            peer: self._pingers[peer].result(target.address, target.packet_bytes)
            for peer, target in targets.items()
        }

    def answer_until(self, done: Callable[[], bool], patience_s: float) -> None:
        """Go on answering peers that have not finished yet."""
        give_up = time.monotonic() + patience_s
        while not done() and time.monotonic() < give_up:
            self._listen(0.02)

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _send_next(self, turns: deque[int], targets: dict[int, Target], now: float) -> None:
        for _ in range(len(turns)):
            turns.rotate(-1)
            peer = turns[-1]
            if self._pingers[peer].due(now):
                message = MESSAGE.pack(PING, self._run, self._rank, peer, self._pingers[peer].send(now))
                target = targets[peer]
                with suppress(OSError):  # no route, or a full socket: it counts as lost
                    self._socket.sendto(
                        message.ljust(target.packet_bytes, b"\0"), (target.address, target.port)
                    )
                return

    def _listen(self, timeout_s: float) -> None:
        if not select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            return
        with suppress(OSError):  # the socket is empty
            while True:
                size, source = self._socket.recvfrom_into(self._buffer)
                if size >= MESSAGE.size:
                    self._take(source)

    def _take(self, source: tuple[str, int]) -> None:
        kind, run, sender, to, number = MESSAGE.unpack_from(self._buffer)
        if run != self._run or to != self._rank or sender >= len(self._heard):
            return
        if kind == PING:
            self._heard[sender].add(number)
            with suppress(OSError):
                self._socket.sendto(MESSAGE.pack(PONG, run, to, sender, number), source)
        elif kind == PONG and sender in self._pingers:
            self._pingers[sender].answered(number, time.monotonic())


def _enlarge(lane: socket.socket, receive_buffer_bytes: int) -> None:
    """Ask for a buffer as a lane does. What the kernel does not grant here, it does not grant to a lane."""
    if receive_buffer_bytes:
        for option in (_SO_RCVBUFFORCE, socket.SO_RCVBUF):
            with suppress(OSError):
                lane.setsockopt(socket.SOL_SOCKET, option, receive_buffer_bytes)
                return
