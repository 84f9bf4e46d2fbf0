"""One host's part in other people's jobs. It runs inside the namespace of the host's neighbour.

A job is two programs that average a vector over TCP, pause, and do it again: in the first stage each sends
half of its vector to the other, in the second half of the result.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from tailcut.tools.testbed.probe import CONGESTION_CONTROL

FIRST_PORT = 29600
"""The first job's. Each has a port of its own."""
PATIENCE_S = 60.0
"""After this long without a byte a job ends."""
RETRY_S = 0.05
PIECE = bytes(1 << 16)
STAGES = 2


def gaps_s(seed: int, job: int, gap_mean_s: float) -> Iterator[float]:
    """The pauses before the ops of a job, without end. Both of its hosts draw the same."""
    chance = random.Random(f"{seed}/jobs/{job}")
    while True:
        yield chance.expovariate(1 / gap_mean_s)


def _work(connection: socket.socket, op_bytes: int, gaps: Iterator[float]) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL.encode())
    connection.settimeout(PATIENCE_S)
    for gap_s in gaps:
        time.sleep(gap_s)
        for _ in range(STAGES):
            exchange(connection, op_bytes // STAGES)


def exchange(connection: socket.socket, stage_bytes: int) -> None:
    """Send so much and receive as much, at the same time."""
    sender = threading.Thread(target=_send, args=(connection, stage_bytes), daemon=True)
    sender.start()
    left = stage_bytes
    while left > 0:
        received = len(connection.recv(min(left, len(PIECE))))
        if not received:
            raise ConnectionError("the other end of a job has gone")
        left -= received
    sender.join()


def _send(connection: socket.socket, stage_bytes: int) -> None:
    for begin in range(0, stage_bytes, len(PIECE)):
        connection.sendall(PIECE[: stage_bytes - begin])


def _serve(job: int, op_bytes: int, gaps: Iterator[float]) -> None:
    with socket.create_server(("", FIRST_PORT + job)) as server:
        connection, _ = server.accept()
    _work(connection, op_bytes, gaps)


def _join(job: int, address: str, op_bytes: int, gaps: Iterator[float]) -> None:
    while True:
        try:
            connection = socket.create_connection((address, FIRST_PORT + job), timeout=PATIENCE_S)
        except OSError:
            time.sleep(RETRY_S)  # the other end may not listen yet
        else:
            _work(connection, op_bytes, gaps)
            return


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])

    def gaps(job: int) -> Iterator[float]:
        return gaps_s(order["seed"], job, order["gap_mean_s"])

    size = order["op_bytes"]
    threads = [
        *(threading.Thread(target=_serve, args=(job, size, gaps(job))) for job in order["serves"]),
        *(threading.Thread(target=_join, args=(job, peer, size, gaps(job))) for job, peer in order["joins"]),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
