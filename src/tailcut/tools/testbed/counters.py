"""The counters of a port, which are the same for both kinds of switch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Protocol


@dataclass(frozen=True)
class PortCounters:
    """All but the backlog count from the time when the testbed came up."""

    port: str
    packets: int
    """Packets that left the port, trimmed ones too."""
    bytes: int
    """Bytes of frames, with the lengths that they left with."""
    backlog_bytes: int
    """Bytes that are queued now."""
    max_backlog_bytes: int
    trimmed: int
    trimmed_at_random: int
    """Packets that were trimmed by chance and not for the backlog."""
    dropped_full: int
    """Packets that were dropped above the hard limit."""
    dropped_at_random: int
    dropped_in_bursts: int
    super_packets: int = 0
    """Unsegmented packets. There should be none, because trimming one would cut many."""
    failed: int = 0
    """Packets that were dropped because they could not be trimmed, or because the forwarder was too slow."""

    @property
    def dropped(self) -> int:
        return self.dropped_full + self.dropped_at_random + self.dropped_in_bursts + self.failed

    def since(self, before: PortCounters) -> PortCounters:
        """Return what was counted after ``before``. The backlog and its maximum stay as they are."""
        counted = {
            entry.name: getattr(self, entry.name) - getattr(before, entry.name)
            for entry in fields(self)
            if entry.name not in ("port", "backlog_bytes", "max_backlog_bytes")
        }
        return replace(self, **counted)


class RunningSwitch(Protocol):
    """The switch between the hosts."""

    description: str
    """Which switch it is, for people."""
    forwarded: Collection[str]
    """The ports for which a forwarder decides about packets."""

    def counters(self) -> list[PortCounters]:
        """Return the counters of every port, in order."""

    def close(self) -> None:
        """Let go of the switch. Its parts are removed with the testbed."""
