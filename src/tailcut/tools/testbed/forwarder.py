"""Carries frames from one interface to another in user space, and delays, loses or trims them.

Runs inside the switch. For base delay, without netem, and for switches without BPF.
One process per cable.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailcut.tools.testbed.scenario import Switch
from tailcut.tools.testbed.scenario_file import built_table
from tailcut.tools.testbed.topology import TRIMMED_CLASS, SwitchPort
from tailcut.tools.testbed.virtual_queue import VirtualQueue, cut, is_traffic, is_trimmable

SOL_PACKET, PACKET_STATISTICS, PACKET_IGNORE_OUTGOING = 263, 6, 23  # linux/if_packet.h
ETH_P_ALL = 3
SO_RCVBUFFORCE, SO_SNDBUFFORCE = 33, 32  # asm-generic/socket.h
BUFFER_BYTES = 16 << 20
BATCH_FRAMES = 64
FRAME_BYTES = 1 << 16
PUBLISH_S = 0.05


class Line:
    """One direction, from ``source`` to ``sink``."""

    def __init__(
        self, source: str, sink: str, delay_ns: int, queue: VirtualQueue | None, rules: Switch
    ) -> None:
        self.receiver = _opened(source, ETH_P_ALL)
        self.receiver.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        self.queue = queue
        self._rules = rules
        self._delay_ns = delay_ns
        # Trimmed frames have a queue and a class of their own, so that nothing makes them wait.
        self._ways = [(_opened(sink, 0), deque[tuple[int, bytes]]()) for _ in range(2)]
        self._ways[0][0].setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, TRIMMED_CLASS)

    def take(self) -> None:
        """Read what has come, a batch at most, and decide about it."""
        for _ in range(BATCH_FRAMES):
            try:
                frame = self.receiver.recv(FRAME_BYTES)
            except BlockingIOError:
                return
            now_ns = time.monotonic_ns()
            self._decide(frame, now_ns)

    def _decide(self, frame: bytes, now_ns: int) -> None:
        way = 1
        if self.queue is not None and is_traffic(frame):
            verdict = self.queue.admit(len(frame), is_trimmable(frame, self._rules), now_ns)
            if verdict == "drop":
                return
            if verdict == "trim":
                way, frame = 0, cut(frame, self._rules)
        self._ways[way][1].append((now_ns + self._delay_ns, frame))

    def give(self, now_ns: int) -> list[socket.socket]:
        """Send what is due. Returns the sockets that take no more for now."""
        full = []
        for sender, waiting in self._ways:
            while waiting and waiting[0][0] <= now_ns:
                try:
                    sender.send(waiting[0][1])
                except BlockingIOError:
                    full.append(sender)
                    break
                except OSError:  # the link is down, or its queue is full
                    self._fail(1)
                waiting.popleft()
        return full

    def next_due_ns(self) -> int | None:
        return min((waiting[0][0] for _, waiting in self._ways if waiting), default=None)

    def count_overruns(self) -> None:
        """Count what came faster than it was read."""
        _, drops = struct.unpack("=II", self.receiver.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        self._fail(drops)

    def _fail(self, frames: int) -> None:
        if self.queue is not None:
            self.queue.failed += frames


def _opened(interface: str, protocol: int) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
    opened.bind((interface, protocol))
    opened.setblocking(False)
    for plain, force in ((socket.SO_RCVBUF, SO_RCVBUFFORCE), (socket.SO_SNDBUF, SO_SNDBUFFORCE)):
        opened.setsockopt(socket.SOL_SOCKET, plain, BUFFER_BYTES)  # as much as the system allows
        with suppress(PermissionError):
            opened.setsockopt(socket.SOL_SOCKET, force, BUFFER_BYTES)
    return opened


def forward(lines: Sequence[Line], publish: dict[Path, VirtualQueue]) -> None:
    """Forward for ever."""
    receivers = {line.receiver: line for line in lines}
    publish_at_s = 0.0
    while True:
        now_ns = time.monotonic_ns()
        full = [sender for line in lines for sender in line.give(now_ns)]
        dues_ns = [due_ns for line in lines if (due_ns := line.next_due_ns()) is not None and not full]
        wait_s = min([PUBLISH_S, *(max(0, due_ns - now_ns) / 1e9 for due_ns in dues_ns)])
        ready, _, _ = select.select(list(receivers), full, [], wait_s)
        for receiver in ready:
            receivers[receiver].take()
        if time.monotonic() >= publish_at_s:
            publish_at_s = time.monotonic() + PUBLISH_S
            for line in lines:
                line.count_overruns()
            for path, queue in publish.items():
                _write(path, asdict(queue.counters(time.monotonic_ns())))


def _write(path: Path, document: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document))
    part.rename(path)


def _port(described: dict[str, Any]) -> SwitchPort:
    rules = {key: value for key, value in described.pop("rules").items() if value is not None}
    return SwitchPort(rules=built_table(Switch, rules, "rules"), **described)


def main(arguments: Sequence[str]) -> None:
    order = json.loads(arguments[0])
    lines, publish = [], {}
    for entry in order["lines"]:
        port = _port(entry["port"]) if entry["port"] else None
        queue = VirtualQueue(port, order["seed"]) if port else None
        rules = port.rules if port else Switch()
        lines.append(Line(entry["source"], entry["sink"], round(entry["delay_s"] * 1e9), queue, rules))
        if queue:
            publish[Path(entry["counters"])] = queue
    print("ready", flush=True)
    forward(lines, publish)


if __name__ == "__main__":
    main(sys.argv[1:])
