"""The switch without BPF: a bridge with rate limits, and processes if packets are to be lost or trimmed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tailcut.tools.testbed import system
from tailcut.tools.testbed.cabling import counters_file
from tailcut.tools.testbed.counters import PortCounters
from tailcut.tools.testbed.record import Record
from tailcut.tools.testbed.topology import SwitchPort


class UserSwitch:
    """``forwarded`` are the ports that a process decides about; for the others the kernel counts."""

    def __init__(self, ports: Sequence[SwitchPort], record: Record, forwarded: Sequence[SwitchPort]) -> None:
        self._ports = ports
        self._record = record
        self.forwarded: Collection[str] = [port.name for port in forwarded]
        self._files = {port.name: counters_file(record.directory, port.name) for port in forwarded}
        self.description = (
            "user-space forwarders, no BPF"
            if forwarded
            else "bridge and htb in the kernel, no BPF; this scenario neither trims nor loses"
        )

    def counters(self) -> list[PortCounters]:
        queues = self._queues() if len(self._files) < len(self._ports) else {}
        return [
            _from_file(self._files[port.name], port) if port.name in self._files else queues[port.name]
            for port in self._ports
        ]

    def close(self) -> None:
        pass

    def _queues(self) -> dict[str, PortCounters]:
        shown = json.loads(system.run("tc", "-n", self._record.switch, "-s", "-j", "qdisc", "show"))
        return {entry["dev"]: _from_htb(entry) for entry in shown if entry["kind"] == "htb"}


def _from_file(path: Path, port: SwitchPort) -> PortCounters:
    with contextlib.suppress(FileNotFoundError):
        return PortCounters(**json.loads(path.read_text()))
    return PortCounters(port.name, *[0] * 9)


def _from_htb(entry: dict[str, Any]) -> PortCounters:
    return PortCounters(
        port=entry["dev"],
        packets=entry["packets"],
        bytes=entry["bytes"],
        backlog_bytes=entry["backlog"],
        max_backlog_bytes=0,
        trimmed=0,
        trimmed_at_random=0,
        dropped_full=entry["drops"],
        dropped_at_random=0,
        dropped_in_bursts=0,
    )
