"""Ops over a switch that really trims: what is left of packets is used, with the error that is predicted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tailcut import _native
from tailcut.tools.testbed import HostScenario, load_scenario
from tailcut.tools.testbed import Testbed as Bed  # by its own name pytest takes it for a test
from tailcut.tools.testbed.scenario import Port, Switch

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root for namespaces and BPF")

D = _native.codec_distortion()
W = [1 - d for d in D]
LIMIT_S = 60

WORKER = """
import dataclasses, json, os, sys
import numpy as np
import tailcut

length, ops, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
config = tailcut.Config(deadline_s=20, dscp=10, planes=16, trim_bytes=256)
with tailcut.Group(rank, ranks, tailcut.FileStore(f"{directory}/store"), config) as group:
    lines = []
    for op in range(ops):
        vectors = [np.random.default_rng((op, r)).standard_normal(length, np.float32) for r in range(ranks)]
        mean = np.mean(np.array(vectors, np.float64), axis=0)
        bucket = vectors[rank]
        report = group.allreduce(bucket).wait()
        error = bucket - mean
        lines.append({"status": report.status, "lost": report.lost_frac,
                      "trimmed": report.traffic.trimmed_packets, "received": report.traffic.received_packets,
                      "nmse": float(error @ error / (mean @ mean))})
        np.save(f"{directory}/{rank}-{op}.npy", bucket)
    uncorrected = group.stats().uncorrected_packets
    json.dump({"ops": lines, "uncorrected": uncorrected}, open(f"{directory}/{rank}.json", "w"))
"""


def run(scenario: HostScenario, directory: Path, length: int, ops: int) -> list[dict]:
    directory.mkdir()
    argv = [sys.executable, "-c", textwrap.dedent(WORKER), str(length), str(ops), str(directory)]
    with Bed.up(scenario) as testbed:
        workers = [testbed.spawn(h.rank, argv, stderr=subprocess.PIPE) for h in testbed.hosts]
        for worker in workers:
            _, err = worker.communicate(timeout=LIMIT_S)
            assert worker.returncode == 0, err
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(scenario.hosts)]


def test_both_ways_of_trimming_deliver_the_same_gradients(tmp_path: Path) -> None:
    """Every packet of every op is cut to 256 bytes, with its lengths corrected or left as they were.

    By their mark, which the packets of the rendezvous do not have.
    """
    digests = {}
    for lengths in ("fix-lengths", "leave-lengths"):
        switch = Switch(trim_frac=1.0, trimmable_dscp=10, lengths=lengths)
        directory = tmp_path / lengths
        results = run(HostScenario(name=lengths, hosts=3, switch=switch), directory, length=100_000, ops=2)
        for result in results:
            assert [(op["status"], op["lost"]) for op in result["ops"]] == [("complete", 0.0)] * 2
            assert (result["uncorrected"] > 0) == (lengths == "leave-lengths")
        digests[lengths] = [(directory / f"{rank}-1.npy").read_bytes() for rank in range(3)]
    assert digests["fix-lengths"] == digests["leave-lengths"]


def chances_of(granules: int) -> np.ndarray:
    """Half of the packets are whole; of the others so many of 11 granules have a second plane left."""
    return np.array([0.5, 0.5 * granules / 11, 0.5 * (11 - granules) / 11])


def predicted_nmse(ranks: int) -> float:
    """Of ``trim-50`` at 16 planes: packets hold 11 granules, and 166 bytes are left of a payload.

    That is plane 1 and nine granules of plane 2; of a mean, which is far from Gaussian and so carries its
    gains, 16 bytes less. Independent vectors of unit variance: b bits give w·z + e with Var e = w(1 - w).
    """
    weight = np.array([W[16], W[2], W[1]])
    random = np.random.default_rng(0)
    drawn = weight[random.choice(3, (200_000, ranks - 1), p=chances_of(9))]
    weights = np.concatenate([np.ones((len(drawn), 1)), drawn], axis=1)  # the owner's own is whole
    total = weights.sum(axis=1, keepdims=True)
    uneven = ((weights / total - 1 / ranks) ** 2).sum(axis=1)
    noise = (weights * (1 - weights)).sum(axis=1) / total[:, 0] ** 2
    scatter = float((uneven + noise).mean()) * ranks
    gather = (1 / float(chances_of(7) @ weight) - 1) * (ranks - 1) / ranks  # the owner has its own mean whole
    return scatter + gather * (1 + scatter)


def test_trim_50_completes_at_the_error_that_the_codec_predicts(tmp_path: Path) -> None:
    # Without the trimming for backlog, whose share depends on the machine's timing.
    shipped = load_scenario("trim-50")
    scenario = replace(shipped, switch=replace(shipped.switch, trim_above_bytes=None))
    results = run(scenario, tmp_path / "run", length=4 * 32 * 4096, ops=4)
    ops = [op for result in results for op in result["ops"]]
    assert {(op["status"], op["lost"]) for op in ops} == {("complete", 0.0)}
    shares = [op["trimmed"] / op["received"] for op in ops]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.mean([op["nmse"] for op in ops]) == pytest.approx(predicted_nmse(4), rel=0.05)


def test_a_congested_port_trims_and_the_op_still_completes(tmp_path: Path) -> None:
    """Uplinks without a limit into ports of 100 Mbit/s, which trim above 60 kB and drop nothing."""
    switch = Switch(trim_above_bytes=60_000)
    port = Port(rate_mbit_s=100, uplink_mbit_s=0, queue_bytes=1_500_000)
    scenario = HostScenario(name="overload", hosts=3, port=port, switch=switch)
    results = run(scenario, tmp_path / "run", length=1_000_000, ops=1)
    assert all(result["ops"][0]["status"] == "complete" for result in results)
    assert any(result["ops"][0]["trimmed"] > 0 for result in results)
    assert all(result["ops"][0]["nmse"] < 2 for result in results)
