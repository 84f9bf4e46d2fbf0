"""Does a paced group share a port with a TCP flow, and its senders with each other? On the testbed, as root.

    python benchmarks/sharing.py --queues 250K,1M,8M --against cubic,bbr --rounds 5

Ranks 0 and 1 average buckets without a pause while host 2 sends into the port of host 0 over TCP. First
tailcut is alone, then both send, then TCP is alone. The ratio is TCP's rate over tailcut's while both send.
Rates are those of payload, as host 0 receives it, at the ends of ops; 0 means that fewer than two ops ended.
Then four ranks do the same alone: how even are the rates of three of them through the port of rank 0?
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

import tailcut
from tailcut.tools.testbed import Testbed, load_scenario

PORT = 5201
SETTLING_S = 1.0  # the time after the other side has come or gone
UNITS = {"K": 1_000, "M": 1_000_000}


def tell(**values: object) -> None:
    print(json.dumps(values), flush=True)


# ---- on the hosts -----------------------------------------------------------------------------------------


def average(directory: str, rank: int, ranks: int, until_s: float, bucket_bytes: int, in_flight: int) -> None:
    """Averages buckets without a pause until a time that all ranks know."""
    config = tailcut.Config(codec="raw", deadline_s=30.0)
    with tailcut.Group(rank, ranks, tailcut.FileStore(Path(directory)), config) as group:
        tell(came=group.stats().traffic.received_bytes, at_s=time.monotonic())
        buckets = [np.ones(bucket_bytes // 4, np.float32) for _ in range(in_flight)]
        works = [group.allreduce(bucket) for bucket in buckets]
        while True:
            report = works.pop(0).wait()
            last_s = [report.links[peer].scatter.last_s for peer in range(ranks) if peer != rank]
            tell(came=group.stats().traffic.received_bytes, at_s=time.monotonic(), last_s=last_s)
            # The mean decides because it is the same everywhere: so every rank makes the same number of
            # calls.
            goes_on = bool(buckets[0][0] > 0)
            buckets.append(buckets.pop(0))
            if not goes_on:
                break
            buckets[-1][:] = -1.0 if time.monotonic() > until_s else 1.0
            works.append(group.allreduce(buckets[-1]))
        for work in works:
            work.wait()
        stats = group.stats()
        tell(sent=stats.traffic.sent_packets, blocked=stats.blocked_sends)


def tcp_receive() -> None:
    with socket.create_server(("", PORT)) as server:
        tell(listening=True)
        connection, _ = server.accept()
        total, told_s = 0, 0.0
        while block := connection.recv(1 << 18):
            total += len(block)
            if time.monotonic() - told_s > 0.05:
                told_s = time.monotonic()
                tell(came=total, at_s=told_s)


def tcp_send(address: str, algorithm: str, from_s: float, until_s: float) -> None:
    time.sleep(max(0.0, from_s - time.monotonic()))
    with socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())
        connection.connect((address, PORT))
        block = bytes(1 << 18)
        while time.monotonic() < until_s:
            connection.send(block)


# ---- the measurement --------------------------------------------------------------------------------------


def rate_mbit_s(lines: list[dict[str, float]], from_s: float, until_s: float) -> float:
    """The rate of what came between two times, from the totals reported nearest to them."""
    inside = [line for line in lines if from_s <= line.get("at_s", -1.0) <= until_s]
    if len(inside) < 2 or inside[-1]["at_s"] - inside[0]["at_s"] < (until_s - from_s) / 3:
        return 0.0
    came = inside[-1]["came"] - inside[0]["came"]
    return 8e-6 * came / (inside[-1]["at_s"] - inside[0]["at_s"])


class Round:
    """Processes on a testbed's hosts, and what they reported when all have ended."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, host: int, *arguments: object) -> subprocess.Popen[bytes]:
        argv = [sys.executable, __file__, "--play", json.dumps(arguments)]
        process = self._testbed.spawn(host, argv, stdout=subprocess.PIPE)
        self._processes.append(process)
        return process

    def told(self) -> list[list[dict[str, float]]]:
        outputs = [process.communicate(timeout=120)[0] for process in self._processes]
        return [[json.loads(line) for line in output.splitlines()] for output in outputs]


def against_tcp(testbed: Testbed, algorithm: str, phase_s: float) -> tuple[float, float, float, float]:
    """Rates in Mbit/s: tailcut alone, tailcut and TCP together, TCP alone."""
    play = Round(testbed)
    receiver = play.start(0, "tcp_receive")
    assert receiver.stdout
    receiver.stdout.readline()
    start_s = time.monotonic() + 2.0  # the ranks have met by then
    both_s, alone_s, end_s = (start_s + k * phase_s for k in (1, 3, 4))
    play.start(2, "tcp_send", testbed.hosts[0].address, algorithm, both_s, end_s)
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(2):
            play.start(rank, "average", directory, rank, 2, alone_s, 2_000_000, 2)
        tcp, _, ours, _ = play.told()
    return (
        rate_mbit_s(ours, start_s, both_s),
        rate_mbit_s(ours, both_s + SETTLING_S, alone_s),
        rate_mbit_s(tcp, both_s + SETTLING_S, alone_s),
        rate_mbit_s(tcp, alone_s + SETTLING_S, end_s),
    )


def among_senders(testbed: Testbed, phase_s: float) -> tuple[float, float]:
    """Mbit/s into the port of rank 0, and the slowest sender's rate over the fastest's (median over ops)."""
    play = Round(testbed)
    start_s = time.monotonic() + 2.0
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(4):
            play.start(rank, "average", directory, rank, 4, start_s + 2 * phase_s, 8_000_000, 1)
        ours = play.told()[0]
    evenness = [min(line["last_s"]) / max(line["last_s"]) for line in ours if "last_s" in line]  # type: ignore[call-overload]
    return rate_mbit_s(ours, start_s, start_s + 2 * phase_s), median(evenness[2:])


def spread(values: list[float], digits: int = 0) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--queues", default="250K,1M,8M", help="of the ports, in bytes (default: %(default)s)"
    )
    parser.add_argument("--against", default="cubic,bbr", help="TCP's algorithms (default: %(default)s)")
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of the ports (default: 200)")
    parser.add_argument("--phase-s", type=float, default=3.0, help="a third of a round (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    arguments = parser.parse_args()
    scenario = load_scenario("clean", hosts=4)
    for queue in arguments.queues.split(","):
        queue_bytes = int(float(queue[:-1]) * UNITS[queue[-1]]) if queue[-1] in UNITS else int(queue)
        port = dataclasses.replace(scenario.port, queue_bytes=queue_bytes, rate_mbit_s=arguments.rate_mbit)
        with Testbed.up(dataclasses.replace(scenario, port=port)) as testbed:
            for algorithm in filter(None, arguments.against.split(",")):
                rounds = [against_tcp(testbed, algorithm, arguments.phase_s) for _ in range(arguments.rounds)]
                alone, ours, tcp, tcp_alone = (list(column) for column in zip(*rounds, strict=True))
                ratios = [t / o if o else float("inf") for o, t in zip(ours, tcp, strict=True)]
                print(
                    f"queue {queue:>5} {algorithm:<6} alone: tailcut {spread(alone)}, TCP {spread(tcp_alone)}"
                    f" Mbit/s   together: tailcut {spread(ours)}, TCP {spread(tcp)}"
                    f"   ratio {spread(ratios, 2)}",
                    flush=True,
                )
            each = [among_senders(testbed, arguments.phase_s) for _ in range(arguments.rounds)]
            rates, evenness = (list(column) for column in zip(*each, strict=True))
            print(
                f"queue {queue:>5} three senders to one: {spread(rates)} Mbit/s, "
                f"slowest over fastest {spread(evenness, 2)}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        role, *values = json.loads(sys.argv[2])
        {"average": average, "tcp_receive": tcp_receive, "tcp_send": tcp_send}[role](*values)
    else:
        main()
