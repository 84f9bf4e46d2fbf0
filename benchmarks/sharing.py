"""Does a paced group share a port with a TCP flow, and its senders with each other? On the testbed, as root.

    python benchmarks/sharing.py --queues 250K,1M --against cubic,bbr --sizes 250K,1M,8M --rounds 3

Four ranks average buckets, one after the other or with a pause as long as their bytes take alone. After a
while host 4 sends into the port of rank 0 over TCP, beside the three paths of the other ranks.

A group counts as one flow: the ring over TCP that it replaces has one flow into each port, and a larger group
must not take more. So while both have something to send, each is to get half of the port. If tailcut alone
takes A and TCP alone C, the bytes of an op take A/C of the group's time, and twice that beside TCP. The fair
rates are therefore A / (1 + A/C) for tailcut and the rest of C for TCP: half each without pauses.

Rates are those of payload, as host 0 receives it; tailcut's from the end of an op to the end of another.
Then the four ranks are alone: how even are the rates of three of them through the port of rank 0?
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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
RANKS, SENDER = 4, 4
MEETING_S = 2.0  # the time that ranks take to meet
SETTLING_S = 1.0  # the time after the other side has come
UNITS = {"K": 1_000, "M": 1_000_000}


def tell(**values: object) -> None:
    print(json.dumps(values), flush=True)


# ---- on the hosts -----------------------------------------------------------------------------------------


def average(directory: str, rank: int, until_s: float, bucket_bytes: int, pause_s: float) -> None:
    """Average buckets until a time that all ranks know."""
    # Bounds that adapt would cut ops, and the end must come to all ranks.
    config = tailcut.Config(codec="raw", deadline_s=30.0, adaptive=False)
    with tailcut.Group(rank, RANKS, tailcut.FileStore(Path(directory)), config) as group:
        bucket = np.ones(bucket_bytes // 4, np.float32)
        # The mean decides because it is the same everywhere: so every rank makes the same number of calls.
        while bucket[0] > 0:
            time.sleep(pause_s)
            bucket[:] = -1.0 if time.monotonic() > until_s else 1.0
            report = group.allreduce(bucket).wait()
            last_s = [report.links[peer].scatter.last_s for peer in range(RANKS) if peer != rank]
            tell(came=group.stats().traffic.received_bytes, at_s=time.monotonic(), last_s=last_s)


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

    def listen(self) -> None:
        receiver = self.start(0, "tcp_receive")
        assert receiver.stdout
        receiver.stdout.readline()


def tcp_alone(testbed: Testbed, algorithm: str, phase_s: float) -> float:
    """Mbit/s."""
    play = Round(testbed)
    play.listen()
    start_s = time.monotonic()
    play.start(SENDER, "tcp_send", testbed.hosts[0].address, algorithm, start_s, start_s + 2 * phase_s)
    return rate_mbit_s(play.told()[0], start_s + SETTLING_S, start_s + 2 * phase_s)


def against_tcp(
    testbed: Testbed, algorithm: str, bucket_bytes: int, pause_s: float, phase_s: float
) -> tuple[float, float, float]:
    """Rates in Mbit/s: tailcut alone, and tailcut and TCP together."""
    play = Round(testbed)
    play.listen()
    start_s = time.monotonic() + MEETING_S
    both_s, end_s = start_s + phase_s, start_s + SETTLING_S + 3 * phase_s
    play.start(SENDER, "tcp_send", testbed.hosts[0].address, algorithm, both_s, end_s)
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(RANKS):
            play.start(rank, "average", directory, rank, end_s, bucket_bytes, pause_s)
        tcp, _, ours, *_ = play.told()
    return (
        rate_mbit_s(ours, start_s, both_s),
        rate_mbit_s(ours, both_s + SETTLING_S, end_s),
        rate_mbit_s(tcp, both_s + SETTLING_S, end_s),
    )


def fair_shares(rounds: list[tuple[float, float, float]], tcp_alone: float) -> str:
    """How much of its fair rate each side got."""
    alone, ours, tcp = (list(column) for column in zip(*rounds, strict=True))
    fair = [rate / (1 + rate / tcp_alone) for rate in alone]
    our_shares = [rate / fair_rate for rate, fair_rate in zip(ours, fair, strict=True)]
    tcp_shares = [rate / (tcp_alone - fair_rate) for rate, fair_rate in zip(tcp, fair, strict=True)]
    return (
        f"alone {median(alone):3.0f}  together: tailcut {spread(ours)}, TCP {spread(tcp)} Mbit/s"
        f"   of the fair share: tailcut {spread(our_shares, 2)}, TCP {spread(tcp_shares, 2)}"
    )


def among_senders(testbed: Testbed, phase_s: float) -> tuple[float, float]:
    """Mbit/s into the port of rank 0, and the slowest sender's rate over the fastest's (median over ops)."""
    play = Round(testbed)
    start_s = time.monotonic() + MEETING_S
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(RANKS):
            play.start(rank, "average", directory, rank, start_s + 2 * phase_s, 8_000_000, 0.0)
        ours = play.told()[0]
    evenness = [min(line["last_s"]) / max(line["last_s"]) for line in ours]  # type: ignore[call-overload]
    return rate_mbit_s(ours, start_s, start_s + 2 * phase_s), median(evenness[2:])


def spread(values: list[float], digits: int = 0) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def bytes_of(size: str) -> int:
    return int(float(size[:-1]) * UNITS[size[-1]]) if size[-1] in UNITS else int(size)


def listed(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--queues", type=listed, default="250K,1M", help="of the ports, in bytes (default: %(default)s)"
    )
    parser.add_argument(
        "--against", type=listed, default="cubic,bbr", help="TCP's algorithms (default: %(default)s)"
    )
    parser.add_argument(
        "--sizes", type=listed, default="250K,1M,8M", help="of the buckets, in bytes (default: %(default)s)"
    )
    parser.add_argument(
        "--pauses", type=listed, default="0,1", help="over the time of the bytes (default: %(default)s)"
    )
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of the ports (default: 200)")
    parser.add_argument("--phase-s", type=float, default=2.0, help="tailcut alone; twice that together")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    arguments = parser.parse_args()
    scenario = load_scenario("clean", hosts=RANKS + 1)
    for queue in arguments.queues:
        port = dataclasses.replace(
            scenario.port, queue_bytes=bytes_of(queue), rate_mbit_s=arguments.rate_mbit
        )
        with Testbed.up(dataclasses.replace(scenario, port=port)) as testbed:
            for algorithm in arguments.against:
                alone = tcp_alone(testbed, algorithm, arguments.phase_s)
                print(f"queue {queue:>5} {algorithm:<6} alone: {alone:.0f} Mbit/s", flush=True)
                for size, pause in itertools.product(arguments.sizes, map(float, arguments.pauses)):
                    bucket_bytes = bytes_of(size)
                    bytes_s = 2 * (RANKS - 1) / RANKS * 8e-6 * bucket_bytes / arguments.rate_mbit
                    phase_s = max(arguments.phase_s, 3 * (1 + pause) * bytes_s)
                    rounds = [
                        against_tcp(testbed, algorithm, bucket_bytes, pause * bytes_s, phase_s)
                        for _ in range(arguments.rounds)
                    ]
                    print(
                        f"queue {queue:>5} {algorithm:<6} {size:>5} pause {1e3 * pause * bytes_s:3.0f} ms"
                        f"   {fair_shares(rounds, alone)}",
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
