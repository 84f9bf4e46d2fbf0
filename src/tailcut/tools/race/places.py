"""Where the ranks of a cell run: on the hosts of a testbed, or side by side on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_interface
from pathlib import Path
from typing import Protocol

from tailcut.errors import ConfigError
from tailcut.tools.testbed import HostScenario, Testbed, system
from tailcut.tools.testbed.faults import FaultPlayer, schedule

CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
ON_LOOPBACK = ("freeze", "release", "kill")
"""The troubles of a scenario that need no network of their own."""

Process = subprocess.Popen[bytes]


class Place(Protocol):
    """What a cell needs of a testbed."""

    @property
    def killed(self) -> set[int]: ...

    def spawn(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int
    ) -> Process: ...

    def begin(self) -> None:
        """Start the scenario's trouble: its faults and other people's traffic."""

    def end(self) -> None: ...


class OnTestbed:
    """One rank on each host."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed

    @property
    def killed(self) -> set[int]:
        return self._testbed.killed

    def spawn(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int
    ) -> Process:
        return self._testbed.spawn(rank, argv, env, stdout=stdout, stderr=stderr)

    def begin(self) -> None:
        self._testbed.begin_faults()
        self._testbed.begin_background()

    def end(self) -> None:
        self._testbed.end_faults()
        self._testbed.end_background()


class Loopback:
    """All ranks on 127.0.0.1. Of the scenario's trouble, freezes and kills happen here too."""

    def __init__(self, scenario: HostScenario) -> None:
        self._scenario = scenario
        self._processes: dict[int, list[Process]] = {rank: [] for rank in range(scenario.hosts)}
        self._faults: FaultPlayer | None = None
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = int(server.getsockname()[1])

    @property
    def killed(self) -> set[int]:
        return self._faults.killed if self._faults else set()

    def spawn(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int
    ) -> Process:
        ours = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._scenario.hosts),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        process = subprocess.Popen(
            argv,
            env={**os.environ, **ours, **env},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._processes[rank].append(process)
        return process

    def begin(self) -> None:
        events = (event for event in schedule(self._scenario) if event.action in ON_LOOPBACK)
        self._faults = FaultPlayer(events, "", self._processes, None, lambda event: None)

    def end(self) -> None:
        if self._faults:
            self._faults.close()


@contextlib.contextmanager
def place_of(scenario: HostScenario, *, loopback: bool, tcp: str | None = None) -> Iterator[Place]:
    """A place that is there for one cell. A testbed needs root (``become_root_of_a_namespace``)."""
    if loopback:
        yield Loopback(scenario)
        return
    with Testbed.up(scenario) as testbed:
        for host in testbed.hosts if tcp else ():
            # Set by route: in a namespace, the sysctl allows only what the machine allows to everybody.
            network = ip_interface(f"{host.address}/24").network
            route = ("route", "change", str(network), "dev", "eth0", "congctl", str(tcp))
            system.run("ip", "-n", host.namespace, *route)
        yield OnTestbed(testbed)


def check_tcp(tcp: str) -> None:
    if tcp not in (known := CONGESTION_CONTROLS.read_text().split()):
        raise ConfigError(f"--tcp {tcp}: this kernel has {', '.join(known)} (modprobe tcp_...)")


def default_tcp() -> str:
    return Path(CONGESTION_CONTROL).read_text().strip()
