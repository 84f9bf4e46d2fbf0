"""A testbed that is up: its hosts, processes on them, its counters. What came up goes down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Literal

from tailcut.errors import TailcutError
from tailcut.tools.testbed import system, topology
from tailcut.tools.testbed.cabling import cables
from tailcut.tools.testbed.counters import PortCounters, RunningSwitch
from tailcut.tools.testbed.faults import Event, FaultPlayer, schedule
from tailcut.tools.testbed.main_threads import MainThreads
from tailcut.tools.testbed.privilege import require_networks
from tailcut.tools.testbed.record import MARK, Record, remove_leftovers
from tailcut.tools.testbed.scenario import HostScenario, burst_frames_per_s, burst_payload_bytes
from tailcut.tools.testbed.switch_bpf import BpfSwitch
from tailcut.tools.testbed.switch_user import UserSwitch

SwitchKind = Literal["auto", "bpf", "forwarder"]
MASTER_PORT = 29500
AGENT_ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
"""Modules in the user's directory are not for the testbed's own processes."""


@dataclass(frozen=True)
class Host:
    """The place of one rank."""

    rank: int
    namespace: str
    address: str


class Testbed:
    """Made by ``Testbed.up``. Its processes end with this process, however it ends."""

    def __init__(self, scenario: HostScenario, record: Record, switch: RunningSwitch) -> None:
        self.scenario = scenario
        self.record = record
        self.switch = switch
        self.hosts = [Host(rank, record.host(rank), topology.address(rank)) for rank in range(scenario.hosts)]
        self._processes: dict[int, list[subprocess.Popen[bytes]]] = {host.rank: [] for host in self.hosts}
        self._agents: list[subprocess.Popen[bytes]] = []
        self._background: list[subprocess.Popen[bytes]] = []
        self._main_threads: MainThreads | None = None
        self._faults: FaultPlayer | None = None

    @classmethod
    @contextlib.contextmanager
    def up(cls, scenario: HostScenario, switch: SwitchKind = "auto") -> Iterator[Testbed]:
        """Bring the scenario's network up, and down at the end. First remove what killed testbeds left."""
        require_networks()
        remove_leftovers()
        record = Record.create()
        try:
            with contextlib.ExitStack() as stack:
                testbed = cls._built(scenario, record, switch)
                stack.callback(testbed._stop)
                testbed._start_forwarders()
                yield testbed
        finally:
            with _undisturbed():
                record.remove()

    @classmethod
    def _built(cls, scenario: HostScenario, record: Record, kind: SwitchKind) -> Testbed:
        ports = topology.switch_ports(scenario)
        use_bpf = kind == "bpf" or (kind == "auto" and not system.in_user_namespace())
        forwarded = not use_bpf and scenario.switch.touches_packets
        virtual = [port.name for port in ports if use_bpf or (forwarded and port.delay_s is None)]
        topology.build(scenario, record, forwarded=forwarded, virtual=virtual)
        if use_bpf:
            return cls(scenario, record, BpfSwitch(ports, record, scenario.seed))
        by_process = [port for port in ports if forwarded or port.delay_s is not None]
        return cls(scenario, record, UserSwitch(ports, record, by_process))

    def _start_forwarders(self) -> None:
        ports = topology.switch_ports(self.scenario)
        orders = [
            json.dumps({"seed": self.scenario.seed, "lines": lines})
            for lines in cables(ports, self.switch.forwarded, self.record.directory)
        ]
        agents = [self.spawn_agent(self.record.switch, "forwarder", order, talk=True) for order in orders]
        for agent in agents:
            assert agent.stdout
            if not agent.stdout.readline():
                raise TailcutError("a forwarder of the testbed did not start; see what it said above")

    def spawn(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, as a rank of one group. ``env`` is added to this process's environment.

        It is the first of a session, and is killed when the thread that called this ends.
        """
        both = {**self.rank_environment(host), **(env or {})}
        process = self._spawn_in(self.hosts[host].namespace, argv, both, stdin, stdout, stderr)
        self._processes[host].append(process)
        return process

    def begin_faults(self, tell: Callable[[Event], None] = lambda event: None) -> None:
        """Start the scenario's clock. Freezes, hangs, kills and links that go down act on what was spawned.

        Called again, it begins anew.
        """
        self.end_faults()
        if self.scenario.hangs and self._main_threads is None:
            self._main_threads = MainThreads(self.spawn_agent(self.record.switch, "hang", talk=True))
        self._faults = FaultPlayer(
            schedule(self.scenario), self.record.switch, self._processes, self._main_threads, tell
        )

    def end_faults(self) -> None:
        """Stop the scenario's clock. What is frozen, hangs or is dark comes back."""
        if self._faults:
            self._faults.close()

    def begin_background(self, start_s: float | None = None) -> None:
        """Start the scenario's background traffic, if it has any and does not run. It begins anew, with
        the same times, after ``end_background``. The times of bursts count from ``start_s`` of
        ``time.monotonic()``; None is as soon as their sender runs."""
        if self._background:
            return
        if order := burst_order(self.scenario):
            self._background.append(
                self.spawn_agent(self.record.background, "bursts", json.dumps({**order, "start_s": start_s}))
            )
        for sender, order in enumerate(neighbour_orders(self.scenario)):
            agent = self.spawn_agent(self.record.neighbour(sender), "neighbours", json.dumps(order))
            self._background.append(agent)
        for host, order in enumerate(job_orders(self.scenario)):
            agent = self.spawn_agent(self.record.neighbour(host), "jobs", json.dumps(order))
            self._background.append(agent)

    def end_background(self) -> None:
        """Stop the background traffic. What is in the queues of the switch still leaves."""
        for agent in self._background:
            agent.kill()
        for agent in self._background:
            agent.wait()
        self._background = []

    @property
    def killed(self) -> set[int]:
        """Hosts whose processes the scenario has killed."""
        return self._faults.killed if self._faults else set()

    def spawn_agent(
        self, namespace: str, module: str, *arguments: str, talk: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a module of the testbed itself inside a namespace. With ``talk`` there are pipes to it."""
        argv = [sys.executable, "-m", f"tailcut.tools.testbed.{module}", *arguments]
        pipe = subprocess.PIPE if talk else subprocess.DEVNULL
        agent = self._spawn_in(namespace, argv, AGENT_ENVIRONMENT, pipe, pipe, None)
        self._agents.append(agent)
        return agent

    def rank_environment(self, host: int) -> dict[str, str]:
        """Return what torchrun would set, with one rank on each host."""
        return {
            "RANK": str(host),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(MASTER_PORT),
            # Otherwise they take the address of the machine's name, which is not on this network.
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
        }

    def counters(self) -> list[PortCounters]:
        return self.switch.counters()

    def enter_command(self, host: int) -> str:
        """Return what a person types to be on a host."""
        inside = f"ip netns exec {self.hosts[host].namespace}"
        if system.in_user_namespace():
            return f"nsenter --preserve-credentials --user --mount --net --target {os.getpid()} {inside}"
        return inside

    def summary(self) -> str:
        port = self.scenario.port
        return (
            f"{self.scenario.name}, {len(self.hosts)} hosts at {port.rate_mbit_s:g} Mbit/s, "
            f"MTU {port.mtu_bytes}; switch: {self.switch.description}"
        )

    def publish_status(self) -> None:
        """Write the status for ``tailcut testbed status``."""
        self.record.write_status(self.status())

    def status(self) -> dict[str, Any]:
        return {
            "id": self.record.id,
            "scenario": self.scenario.name,
            "owner_pid": self.record.owner_pid,
            "switch": self.switch.description,
            "hosts": [{**asdict(host), "enter": self.enter_command(host.rank)} for host in self.hosts],
            "ports": [asdict(counters) for counters in self.counters()],
        }

    def _stop(self) -> None:
        """End the processes, so that whoever holds one learns how it ended, and let go of the rest."""
        self.end_faults()
        processes = [*self._agents, *chain.from_iterable(self._processes.values())]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for agent in self._agents:
            for pipe in (agent.stdin, agent.stdout):
                if pipe:
                    pipe.close()
        self.switch.close()

    def _spawn_in(
        self,
        namespace: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
    ) -> subprocess.Popen[bytes]:
        # The kernel ends the command with this thread, so this also holds when this process is killed.
        die_along = [system.program("setpriv"), "--pdeathsig", "KILL"]
        return subprocess.Popen(
            [*die_along, system.program("ip"), "netns", "exec", namespace, *argv],
            env={**os.environ, **env, MARK: self.record.id},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def burst_order(scenario: HostScenario) -> dict[str, Any] | None:
    """Return what the agent that sends bursts is told."""
    if (bursts := scenario.background) is None:
        return None
    return {
        "addresses": [topology.shadow_address(host) for host in range(scenario.hosts)],
        "payload_bytes": burst_payload_bytes(scenario.port.mtu_bytes),
        "frames_per_s": burst_frames_per_s(scenario.port),
        "seed": scenario.seed,
        **asdict(bursts),
    }


def neighbour_orders(scenario: HostScenario) -> list[dict[str, Any]]:
    """Return what the neighbours are told. Each sends to the one behind the next port."""
    neighbours, ports = scenario.neighbours, range(scenario.hosts)
    return [
        {
            "address": topology.neighbour_address(port),
            "port": port,
            "seed": scenario.seed,
            **asdict(neighbours),
        }
        for port in (*ports[1:], 0)
        if neighbours
    ]


def job_orders(scenario: HostScenario) -> list[dict[str, Any]]:
    """Return what the neighbours of each host are told of the jobs that they are part of."""
    if (jobs := scenario.jobs) is None:
        return []
    pairs = list(enumerate(jobs.pairs(scenario.hosts)))
    return [
        {
            "serves": [job for job, (first, _) in pairs if first == host],
            "joins": [
                (job, topology.neighbour_address(first)) for job, (first, last) in pairs if last == host
            ],
            "op_bytes": jobs.op_bytes,
            "gap_mean_s": jobs.gap_mean_s,
            "seed": scenario.seed,
        }
        for host in range(scenario.hosts)
    ]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold signals back. A second Ctrl-C must not leave half of a testbed behind."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
