"""One neighbour's part in other people's TCP flows. It runs inside the neighbour's namespace.

It receives whatever comes, and sends one flow after the other to the neighbour behind the next port.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from tailcut.tools.testbed.probe import CONGESTION_CONTROL

FLOW_PORT = 29402
PATIENCE_S = 30.0
"""After this long without a byte a flow is given up."""
PIECE = bytes(1 << 16)


def gaps_s(seed: int, port: int, gap_mean_s: float) -> Iterator[float]:
    """The pauses before the flows into a port, without end."""
    chance = random.Random(f"{seed}/neighbours/{port}")
    while True:
        yield chance.expovariate(1 / gap_mean_s)


def _receive(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.settimeout(PATIENCE_S)
        while connection.recv(len(PIECE)):
            pass


def _serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_receive, args=(connection,), daemon=True).start()


def _send(address: str, flow_bytes: int) -> None:
    """Send a flow over a connection of its own, and wait until the receiver has all of it."""
    with socket.create_connection((address, FLOW_PORT), timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL.encode())
        for begin in range(0, flow_bytes, len(PIECE)):
            connection.sendall(PIECE[: flow_bytes - begin])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])
    server = socket.create_server(("", FLOW_PORT))
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    for gap_s in gaps_s(order["seed"], order["port"], order["gap_mean_s"]):
        time.sleep(gap_s)
        with suppress(OSError):  # a link may be down, and the receiver may not listen yet
            _send(order["address"], order["flow_bytes"])


if __name__ == "__main__":
    main(sys.argv[1:])
