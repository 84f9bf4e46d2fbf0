"""Measures round trips, rates and the tail of a message before anything runs on a testbed."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tailcut.errors import TailcutError
from tailcut.tools.testbed.probe import CONGESTION_CONTROL
from tailcut.tools.testbed.testbed import Testbed

ROUND_TRIPS = 30
RATE_MESSAGES = 25
TAIL_MESSAGES = 300
"""P99 of this many is the third longest."""
DEFAULT_MESSAGE_BYTES = 1_000_000
TOLERANCE = 0.1


@dataclass(frozen=True)
class PortCharacter:
    """One port, measured from the host before it while all other ports are measured too."""

    host: int
    rtt_s: float
    """The median round trip."""
    rate_mbit_s: float
    """The median rate of a TCP message, of payload."""
    tail_ratio: float | None = None
    """P99/P50 of a message's time while the bursts come."""


@dataclass(frozen=True)
class Character:
    message_bytes: int
    ports: tuple[PortCharacter, ...]
    wanted_ratio: float | None = None

    @property
    def within_tolerance(self) -> bool:
        """Whether the tail of every port is what the scenario asks for."""
        wanted = self.wanted_ratio
        return wanted is None or all(
            port.tail_ratio is not None and abs(port.tail_ratio / wanted - 1) <= TOLERANCE
            for port in self.ports
        )

    def lines(self) -> list[str]:
        shown = [
            "idle RTT   " + "  ".join(f"p{port.host} {1e3 * port.rtt_s:.2f} ms" for port in self.ports),
            "TCP rate   " + "  ".join(f"p{port.host} {port.rate_mbit_s:.0f} Mbit/s" for port in self.ports)
            + f"  ({CONGESTION_CONTROL}, {self.message_bytes} bytes, all at once)",
        ]  # fmt: skip
        if self.wanted_ratio is not None:
            verdict = "ok" if self.within_tolerance else "NOT within it; is the machine busy?"
            shown.append(
                "P99/P50    "
                + "  ".join(f"p{port.host} {port.tail_ratio:.2f}" for port in self.ports)
                + f"  (wanted {self.wanted_ratio:g} ± {TOLERANCE:.0%}: {verdict})"
            )
        return shown


def measure(testbed: Testbed, tail_messages: int = TAIL_MESSAGES) -> Character:
    """Measure the idle network, start the background traffic and measure the tail. The traffic goes on."""
    tail = testbed.scenario.tail
    message_bytes = tail.message_bytes if tail else DEFAULT_MESSAGE_BYTES
    rtts_s = _probe(testbed, "round-trips", ROUND_TRIPS)
    rtts_s = [rtts_s[-1], *rtts_s[:-1]]  # by the host that answered, not by the one that asked
    rates = [
        8e-6 * message_bytes / median(times)
        for times in _probe(testbed, "messages", message_bytes, RATE_MESSAGES)
    ]
    testbed.begin_background()
    ratios: list[float | None] = [None] * len(testbed.hosts)
    if tail:
        ratios = [tail_ratio(times) for times in _probe(testbed, "messages", message_bytes, tail_messages)]
    ports = (
        PortCharacter(host, median(rtts_s[host]), rates[host], ratios[host])
        for host in range(len(testbed.hosts))
    )
    return Character(message_bytes, tuple(ports), tail.ratio if tail else None)


def tail_ratio(times_s: Sequence[float]) -> float:
    """Return P99 over P50, by nearest rank."""
    ordered = sorted(times_s)
    return ordered[math.ceil(0.99 * len(ordered)) - 1] / ordered[math.ceil(0.5 * len(ordered)) - 1]


def _probe(testbed: Testbed, what: str, *numbers: int) -> list[list[float]]:
    """Return what each host has measured."""
    addresses = [host.address for host in testbed.hosts]
    probes = [
        testbed.spawn_agent(
            host.namespace, "probe", what, host.address, addresses[(host.rank + 1) % len(addresses)],
            *map(str, numbers),
            talk=True,
        )
        for host in testbed.hosts
    ]  # fmt: skip
    times = [_heard(probe, host) for host, probe in enumerate(probes)]
    for probe in probes:
        probe.communicate()
    return times


def _heard(probe: subprocess.Popen[bytes], host: int) -> list[float]:
    assert probe.stdout
    times: list[float] = json.loads(probe.stdout.readline() or "[]")
    if not times:
        raise TailcutError(f"host {host} could not measure its neighbour; see what it said above")
    return times
