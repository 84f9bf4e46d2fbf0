"""Where the workers of a benchmark are: beside each other, or each on a host of a testbed."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tailcut.tools.testbed import Testbed


class Placement(Protocol):
    """Where workers run, and what counts their frames."""

    @property
    def namespaces(self) -> tuple[Path, ...]:
        """The network namespace of each rank. If it is empty, all are in that of this process."""

    def wire_bytes(self) -> int | None:
        """The bytes of all frames that have left the switch so far; None if nobody counts them."""


class OnLoopback:
    """The workers are beside each other and use loopback."""

    namespaces: tuple[Path, ...] = ()

    def wire_bytes(self) -> int | None:
        return None


class OnTestbed:
    """Each worker is on a host of a testbed that is up. Background traffic is counted too."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed

    @property
    def namespaces(self) -> tuple[Path, ...]:
        return tuple(Path("/run/netns", host.namespace) for host in self._testbed.hosts)

    def wire_bytes(self) -> int | None:
        return sum(port.bytes for port in self._testbed.counters())
