"""Orders for forwarders: the cables of a testbed that end in a process and not in the kernel's bridge."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailcut.tools.testbed.topology import SwitchPort

Order = list[dict[str, Any]]
"""The lines of one cable, as forwarder.py gets them."""


def cables(ports: Sequence[SwitchPort], deciding: Collection[str], directory: Path) -> list[Order]:
    """List the cables. A port to a host has one if a forwarder decides about its packets. The link between
    sites always has one."""
    orders = []
    between_sites: Order = []
    for port in ports:
        decided = port if port.name in deciding else None
        if port.delay_s is not None:
            site = len(between_sites)
            between_sites.append(_line(f"x{site}", f"x{1 - site}", decided, directory, port.delay_s))
        elif decided:
            inner = f"f{port.number}"
            orders.append([_line(inner, port.name, port, directory), _line(port.name, inner)])
    return [*orders, between_sites] if between_sites else orders


def counters_file(directory: Path, port: str) -> Path:
    """Return the file that a forwarder writes its counters to."""
    return directory / f"{port}.json"


def _line(
    source: str, sink: str, port: SwitchPort | None = None, directory: Path = Path(), delay_s: float = 0.0
) -> dict[str, Any]:
    return {
        "source": source,
        "sink": sink,
        "delay_s": delay_s,
        "port": asdict(port) if port else None,
        "counters": str(counters_file(directory, port.name)) if port else None,
    }
