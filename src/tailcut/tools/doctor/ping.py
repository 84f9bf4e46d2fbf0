"""The datagrams of one rank to another: when the next is due, which were answered. No I/O, no clock."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

COUNT = 200
"""How many datagrams go to each peer. One that is lost is 0.5 %."""

IN_FLIGHT = 4
"""How many may be unanswered at a time. A comfortable receive buffer holds them, so none is lost there."""

PATIENCE_S = 1.0
"""A datagram that is unanswered for this long is not in flight any more. A later answer still counts."""
SHORTEST_PATIENCE_S = 0.05
"""For a peer that answers, patience is 10 times its median answer, and at least this."""


@dataclass(frozen=True)
class Ping:
    """What came of the datagrams to one peer. Answers are small: the peer measures the way back itself."""

    address: str
    packet_bytes: int
    sent: int
    answered: int
    rtt_min_s: float | None
    rtt_median_s: float | None
    """None if there was no answer."""


class Pinger:
    """The datagrams to one peer."""

    def __init__(self, count: int = COUNT, in_flight: int = IN_FLIGHT) -> None:
        self._count = count
        self._in_flight = in_flight
        self._sent_at: list[float] = []
        self._unanswered: dict[int, float] = {}
        """When each datagram was sent, until it is answered or given up."""
        self._rtt_s: dict[int, float] = {}
        self._patience_s = PATIENCE_S

    def due(self, now: float) -> bool:
        return len(self._sent_at) < self._count and self._waiting(now) < self._in_flight

    def send(self, now: float) -> int:
        """Count a datagram that leaves now, and return its number."""
        number = len(self._sent_at)
        self._sent_at.append(now)
        self._unanswered[number] = now
        return number

    def answered(self, number: int, now: float) -> None:
        if number < len(self._sent_at) and number not in self._rtt_s:
            self._unanswered.pop(number, None)
            self._rtt_s[number] = now - self._sent_at[number]
            typical_s = statistics.median(self._rtt_s.values())
            self._patience_s = min(PATIENCE_S, max(SHORTEST_PATIENCE_S, 10 * typical_s))

    def finished(self, now: float) -> bool:
        return len(self._sent_at) == self._count and self._waiting(now) == 0

    def result(self, address: str, packet_bytes: int) -> Ping:
        times_s = self._rtt_s.values()
        return Ping(
            address,
            packet_bytes,
            sent=len(self._sent_at),
            answered=len(times_s),
            rtt_min_s=min(times_s, default=None),
            rtt_median_s=statistics.median(times_s) if times_s else None,
        )

    def _waiting(self, now: float) -> int:
        self._unanswered = {n: at for n, at in self._unanswered.items() if now - at < self._patience_s}
        return len(self._unanswered)
