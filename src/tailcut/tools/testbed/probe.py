"""One host's part in measuring a testbed. It runs on every host at once, each with the next one.

It prints one line of JSON with the round trips to the next host, or with the times of the messages from the
host before.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

ECHO_PORT, MESSAGE_PORT = 29400, 29401
CONGESTION_CONTROL = "cubic"
PATIENCE_S = 30.0
STAMP = struct.Struct("=Q")
"""The time when a message was sent, at its beginning."""
_ECHO_S = 1.0
"""After this long an echo counts as lost."""


def round_trips_s(address: str, peer: str, count: int) -> list[float]:
    """Return the round trips of small UDP packets, one at a time, as far as they came back."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, ECHO_PORT))
    # It echoes until the process ends, because the other host may take longer.
    threading.Thread(target=_echo, args=(server,), daemon=True).start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(_ECHO_S)
        client.connect((peer, ECHO_PORT))
        return _round_trips_s(client, count)


def _round_trips_s(client: socket.socket, count: int) -> list[float]:
    times_s: list[float] = []
    give_up_s = time.monotonic() + PATIENCE_S
    while len(times_s) < count and time.monotonic() < give_up_s:
        start_s = time.perf_counter()
        number = str(start_s).encode()
        try:
            client.send(number)
            while client.recv(64) != number:
                pass
        except ConnectionRefusedError:  # it does not listen yet
            time.sleep(0.01)
        except TimeoutError:
            continue
        else:
            times_s.append(time.perf_counter() - start_s)
    return times_s[1:]  # the first waited for ARP


def _echo(server: socket.socket) -> None:
    while True:
        payload, sender = server.recvfrom(64)
        server.sendto(payload, sender)


def message_times_s(address: str, peer: str, message_bytes: int, count: int) -> list[float]:
    """Return the times of the messages that arrive here over one TCP connection. As many go to ``peer``.

    A time runs from the first byte sent to the last received, one way: all hosts have one clock, and an
    answer would go through another port.
    """
    times_s: list[float] = []
    with socket.create_server((address, MESSAGE_PORT)) as server:
        server.settimeout(PATIENCE_S)
        receiving = threading.Thread(target=_receive, args=(server, message_bytes, times_s))
        receiving.start()
        with _connected(peer) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL.encode())
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rest = bytes(message_bytes - STAMP.size)
            for _ in range(count):
                client.sendall(STAMP.pack(time.monotonic_ns()) + rest)
                if not client.recv(1):
                    break
        receiving.join()
    return times_s


def _connected(peer: str) -> socket.socket:
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((peer, MESSAGE_PORT), timeout=PATIENCE_S)
        except ConnectionRefusedError:  # it does not listen yet
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.01)


def _receive(server: socket.socket, message_bytes: int, times_s: list[float]) -> None:
    connection, _ = server.accept()
    with connection:
        message = memoryview(bytearray(message_bytes))
        filled = 0
        while got := connection.recv_into(message[filled:]):
            filled += got
            if filled == message_bytes:
                (sent_ns,) = STAMP.unpack_from(message)
                times_s.append((time.monotonic_ns() - sent_ns) / 1e9)
                filled = 0
                connection.send(b"\0")


def main(arguments: Sequence[str]) -> None:
    what, address, peer, *numbers = arguments
    if what == "messages":
        message_bytes, count = map(int, numbers)
        print(json.dumps(message_times_s(address, peer, message_bytes, count)), flush=True)
    else:
        print(json.dumps(round_trips_s(address, peer, int(numbers[0]))), flush=True)
        sys.stdin.buffer.read()  # go when told


if __name__ == "__main__":
    main(sys.argv[1:])
