"""benchmarks/ddp_testbed.py: its sides, its table, and a few steps of the real thing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tailcut import ConfigError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LIMIT_S = 300
"""Only a hang takes longer."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("ddp_testbed")


def test_settings_belong_to_the_side_before_them(benchmark: ModuleType) -> None:
    sides = benchmark.parse_sides("tailcut,tailcut:planes=4,resend=0,deadline_s=2,codec=raw,fp16")
    assert [side.name for side in sides] == [
        "tailcut",
        "tailcut:planes=4,resend=0,deadline_s=2,codec=raw",
        "fp16",
    ]
    assert sides[1].config == {"planes": 4, "resend": False, "deadline_s": 2.0, "codec": "raw"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("glue", "there is no side 'glue'; there are tailcut, gloo"),
        ("tailcut:plane=4", "Config has no 'plane'; it has deadline_s"),
        ("tailcut:planes=many", "planes='many' is not of type int"),
        ("tailcut:planes=99", "planes=99 must be between 0 and 16"),
        ("fp16:planes=4", "only tailcut takes settings"),
        ("gloo,gloo", "gloo more than once"),
    ],
)
def test_what_is_wrong_with_a_side_is_named(benchmark: ModuleType, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        benchmark.parse_sides(text)


def cell(side: str, times_s: list[float], evaluations: list[tuple[int, float, float]]) -> dict[str, Any]:
    first = {"times_s": times_s, "evaluations": evaluations, "accuracy": 0.5}
    return {"side": side, "round": 0, "failed": None, "ranks": {0: first, 1: {"times_s": times_s}}}


def test_the_table_compares_at_the_last_step_of_all(benchmark: ModuleType) -> None:
    cells = [
        cell("gloo", [0.1] * 40, [(20, 2.0, 0.4), (40, 4.0, 0.6)]),
        cell("fp16", [0.2] * 30, [(20, 4.0, 0.4), (30, 6.0, 0.7)]),
        {"side": "bf16", "round": 0, "failed": "rank 1 ended with 1", "ranks": {}},
    ]
    _, gloo, fp16, bf16, reason, *_ = benchmark.table(["gloo", "fp16", "bf16"], cells).splitlines()
    ones, halves = "1.00 (1.00-1.00)", "50.0 (50.0-50.0)"
    twos = ones.replace("1.00", "2.00")
    assert gloo.split() == f"gloo 40 100 100 100 {twos} {twos} {halves} {halves}".split()
    assert fp16.split() == f"fp16 30 200 200 200 {ones} {ones} {halves} 70.0 (70.0-70.0)".split()
    assert bf16.split()[:2] == ["bf16", "failed"]
    assert reason == "bf16, round 1: failed: rank 1 ended with 1"


def test_accuracies_are_compared_by_pairs_of_the_same_seed(benchmark: ModuleType) -> None:
    def trained(side: str, number: int, accuracy: float, replicas: str) -> dict[str, Any]:
        ranks = {rank: {"accuracy": accuracy, "parameters": name} for rank, name in enumerate(replicas)}
        return {"side": side, "round": number, "failed": None, "ranks": ranks}

    cells = [
        *(trained("lossless", number, 0.8 + number / 100, "aa") for number in range(3)),
        *(
            trained("tailcut", number, 0.81 + 2 * number / 100, "ab" if number else "aa")
            for number in range(3)
        ),
        {"side": "tailcut", "round": 3, "failed": "rank 1 ended with 1", "ranks": {}},
    ]
    _, line = benchmark.differences("lossless", cells).splitlines()
    assert line == "tailcut: +2.00 (-0.48 to +4.48), 3 seeds; replicas equal at the end of 1"
    assert benchmark.differences("gloo", cells) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root for namespaces and BPF")
def test_sides_take_turns_on_a_testbed(tmp_path: Path) -> None:
    for module in ("torch", "sklearn"):
        pytest.importorskip(module)
    file = tmp_path / "run.json"
    options = "--hosts 2 --sides tailcut:planes=4,fp16 --rounds 1 --seconds 1 --eval-every 2 --data digits"
    command = [sys.executable, str(BENCHMARKS / "ddp_testbed.py"), *options.split(), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "TCP: " in done.stdout
    document = json.loads(file.read_text())
    assert document["machine"]["cores"] >= 1
    assert document["options"]["seconds"] == 1
    assert [cell["side"] for cell in document["cells"]] == ["tailcut:planes=4", "fp16"]
    for measured in document["cells"]:
        assert measured["failed"] is None
        first, second = (measured["ranks"][rank] for rank in ("0", "1"))
        assert len(first["times_s"]) == len(second["times_s"]) >= 5
        assert [step for step, _, _ in first["evaluations"]][:2] == [2, 4]
        assert 0 <= first["accuracy"] <= 1
        assert ("stats" in first) == (measured["side"] != "fp16")
        assert f"{measured['side']} " in done.stdout
