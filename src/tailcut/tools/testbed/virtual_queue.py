"""The switch's decision in Python: what trim.bpf.c does to packets, with the same random numbers.

It is told the time and handed frames, and does nothing else. A test holds the two to each other.
"""

from __future__ import annotations

import random
import struct
from typing import Literal

from tailcut.tools.testbed.counters import PortCounters
from tailcut.tools.testbed.scenario import ANY, Switch
from tailcut.tools.testbed.topology import SwitchPort

Verdict = Literal["pass", "trim", "drop"]
_ETHERNET_BYTES, _IP_BYTES = 14, 20
_IGMP, _UDP = 2, 17
_MASK = (1 << 64) - 1


def first_random(seed: int, port: str) -> int:
    """Return where a port's generator starts. It would never leave 0."""
    return random.Random(f"{seed}/{port}").randrange(1, 1 << 64)


def as_threshold(fraction: float) -> int:
    """Return a probability as trim.bpf.c compares it."""
    return min(round(fraction * (1 << 32)), (1 << 32) - 1)


def ns_per_byte_q10(rate_mbit_s: float) -> int:
    return round(8000 / rate_mbit_s * 1024)


class VirtualQueue:
    """One port: its backlog, its generator, its counters."""

    def __init__(self, port: SwitchPort, seed: int) -> None:
        self._port = port
        self._rules = port.rules
        self._unit_q10 = ns_per_byte_q10(port.rate_mbit_s)
        self._limit_q10 = port.queue_bytes * self._unit_q10
        above = port.rules.trim_above_bytes
        self._trim_above_q10 = None if above is None else above * self._unit_q10
        self._random = first_random(seed, port.name)
        self._loss, self._trim = as_threshold(port.rules.loss_frac), as_threshold(port.rules.trim_frac)
        self._bad = False
        self._last_ns = 0
        self._backlog_q10 = self._max_backlog_q10 = 0
        self._packets = self._bytes = self._trimmed = self._trimmed_at_random = 0
        self._full = self._at_random = self._in_bursts = 0
        self.failed = 0

    def admit(self, length: int, trimmable: bool, now_ns: int) -> Verdict:
        """Decide the fate of a packet, which then counts as gone through the queue."""
        self._drain(now_ns)
        if self._lost():
            return "drop"
        by_chance = trimmable and self._trim > 0 and self._happens(self._trim)
        full_q10 = self._backlog_q10 + length * self._unit_q10
        crowded = self._trim_above_q10 is not None and full_q10 > self._trim_above_q10
        trimmed = by_chance or (trimmable and crowded)
        leaves = self._rules.trim_frame_bytes if trimmed else length
        backlog_q10 = self._backlog_q10 + leaves * self._unit_q10
        if backlog_q10 > self._limit_q10:
            self._full += 1
            return "drop"
        self._backlog_q10 = backlog_q10
        self._max_backlog_q10 = max(self._max_backlog_q10, backlog_q10)
        self._packets += 1
        self._bytes += leaves
        self._trimmed += trimmed
        self._trimmed_at_random += by_chance
        return "trim" if trimmed else "pass"

    def counters(self, now_ns: int) -> PortCounters:
        self._drain(now_ns)
        return PortCounters(
            self._port.name,
            self._packets,
            self._bytes,
            self._backlog_q10 // self._unit_q10,
            self._max_backlog_q10 // self._unit_q10,
            self._trimmed,
            self._trimmed_at_random,
            self._full,
            self._at_random,
            self._in_bursts,
            failed=self.failed,
        )

    def _drain(self, now_ns: int) -> None:
        if now_ns > self._last_ns:
            self._backlog_q10 = max(0, self._backlog_q10 - ((now_ns - self._last_ns) << 10))
            self._last_ns = now_ns

    def _lost(self) -> bool:
        if bursty := self._rules.bursty_loss:
            chance = as_threshold(bursty.leave_frac if self._bad else bursty.enter_frac)
            self._bad ^= self._next_random() < chance
            if self._bad and self._happens(as_threshold(bursty.loss_frac)):
                self._in_bursts += 1
                return True
        if self._loss and self._next_random() < self._loss:
            self._at_random += 1
            return True
        return False

    def _happens(self, threshold: int) -> bool:
        return threshold == (1 << 32) - 1 or self._next_random() < threshold

    def _next_random(self) -> int:
        x = self._random
        x ^= x >> 12
        x ^= (x << 25) & _MASK
        x ^= x >> 27
        self._random = x
        return ((x * 0x2545F4914F6CDD1D) & _MASK) >> 32


def is_traffic(frame: bytes) -> bool:
    """Return whether a frame is neither ARP nor a query of the switch itself."""
    return frame[12:14] == b"\x08\x00" and frame[_ETHERNET_BYTES + 9] != _IGMP


def is_trimmable(frame: bytes, rules: Switch) -> bool:
    if len(frame) <= rules.trim_frame_bytes or frame[14] != 0x45 or frame[23] != _UDP:
        return False
    (fragment,) = struct.unpack_from("!H", frame, 20)
    (to,) = struct.unpack_from("!H", frame, 36)
    dscp = frame[15] >> 2
    if fragment & 0x3FFF or dscp == rules.trimmed_dscp:
        return False
    first, last = rules.trimmable_ports
    return first <= to <= last and rules.trimmable_dscp in (ANY, dscp)


def cut(frame: bytes, rules: Switch) -> bytes:
    """Return the trimmed and marked frame, with lengths and checksums as the mode says."""
    left = bytearray(frame[: rules.trim_frame_bytes])
    left[15] = rules.trimmed_dscp << 2 | left[15] & 3
    fix = rules.lengths == "fix-lengths"
    if fix:
        struct.pack_into("!H", left, 16, len(left) - _ETHERNET_BYTES)
    left[24:26] = b"\0\0"
    struct.pack_into("!H", left, 24, 0xFFFF ^ _sum(left[14:34]))
    if fix:
        length = len(left) - _ETHERNET_BYTES - _IP_BYTES
        struct.pack_into("!H", left, 38, length)
        if left[40:42] != b"\0\0":  # zero: the sender uses no checksum
            left[40:42] = b"\0\0"
            pseudo = left[26:34] + struct.pack("!HH", _UDP, length)
            struct.pack_into("!H", left, 40, (0xFFFF ^ _sum(pseudo + left[34:])) or 0xFFFF)
    return bytes(left)


def _sum(octets: bytes | bytearray) -> int:
    padded = octets + b"\0" * (len(octets) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
