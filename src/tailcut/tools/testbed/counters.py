"""What a port of the switch has counted, whichever switch it is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Protocol


@dataclass(frozen=True)
class PortCounters:
    """Since the testbed came up, but for the backlog."""

    port: str
    packets: int
    """That left, trimmed ones too."""
    bytes: int
    """Of frames, with the lengths they left with."""
    backlog_bytes: int
    """Queued now."""
    max_backlog_bytes: int
    trimmed: int
    trimmed_at_random: int
    """Of the trimmed, those by chance and not for backlog."""
    dropped_full: int
    """Above the hard limit."""
    dropped_at_random: int
    dropped_in_bursts: int
    super_packets: int = 0
    """Unsegmented packets: should be none, as trimming one would cut many."""
    failed: int = 0
    """Dropped because they could not be trimmed, or because the forwarder was too slow."""

    @property
    def dropped(self) -> int:
        return self.dropped_full + self.dropped_at_random + self.dropped_in_bursts + self.failed

    def since(self, before: PortCounters) -> PortCounters:
        """What was counted after ``before``; the backlog and its maximum are as they are."""
        counted = {
            entry.name: getattr(self, entry.name) - getattr(before, entry.name)
            for entry in fields(self)
            if entry.name not in ("port", "backlog_bytes", "max_backlog_bytes")
        }
        return replace(self, **counted)


class RunningSwitch(Protocol):
    """What stands between the hosts."""

    description: str
    """Which one it is, for people."""
    forwarded: Collection[str]
    """Ports about whose packets a forwarder decides."""

    def counters(self) -> list[PortCounters]:
        """Of every port, in their order."""

    def close(self) -> None:
        """Let go of it; what it consists of is removed with the testbed."""
