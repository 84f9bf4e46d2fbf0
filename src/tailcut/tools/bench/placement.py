"""Where the workers of a benchmark are: beside each other, or each on a host of a testbed."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tailcut.tools.testbed import Testbed


class Placement(Protocol):
    @property
    def namespaces(self) -> tuple[Path, ...]:
        """Each rank's network namespace; none: this process's."""

    def wire_bytes(self) -> int | None:
        """Of all frames that left the switch so far; None if nobody counts."""


class OnLoopback:
    """Loopback."""

    namespaces: tuple[Path, ...] = ()

    def wire_bytes(self) -> int | None:
        return None


class OnTestbed:
    """A testbed that is up. Its background traffic is counted too."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed

    @property
    def namespaces(self) -> tuple[Path, ...]:
        return tuple(Path("/run/netns", host.namespace) for host in self._testbed.hosts)

    def wire_bytes(self) -> int | None:
        return sum(port.bytes for port in self._testbed.counters())
