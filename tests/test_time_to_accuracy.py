"""benchmarks/time_to_accuracy.py: its book, its tables and pages, and one short matrix."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tailcut import ConfigError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FACTS = {
    "name": "cnn",
    "source": "Fashion-MNIST",
    "parameters": 1_592_326,
    "batch": 128,
    "figure": "accuracy",
    "higher_is_better": True,
    "target": 0.5,
}
MACHINE = {"cpu": "some", "cores": 2, "kernel": "6", "torch": "2"}
CONDITIONS = {"model": "cnn", "seconds": 10.0, "steps": None, "rate_mbit": None, "loopback": False}


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def cell(side: str, seed: int, slope: float, failed: str | None = None) -> dict[str, Any]:
    """The figure rises by the slope in each second; at 10 s it ends."""
    seconds = range(11) if slope else []
    address = {"scenario": "clean", "tcp": "bbr", "seed": seed, "side": side}
    times = {"p50_s": 0.1, "p90_s": 0.15, "p99_s": 0.2, "max_s": 0.3}
    return {
        **address,
        **times,
        **({} if failed else {"figure": 10 * slope, "replicas_equal": True}),
        "commit": "abc",
        "facts": FACTS,
        "failed": failed,
        "steps": 100,
        "lasted_s": 10.0,
        "evaluations": [(10 * at_s, float(at_s), slope * at_s) for at_s in seconds],
    }


CELLS = [
    *(cell("gloo", seed, 0.04) for seed in range(2)),
    *(cell("fp16", seed, 0.0625) for seed in range(2)),
    *(cell("tailcut", seed, 0.25 / (1 + seed)) for seed in range(2)),
    *(cell("powersgd", seed, 0.0, "rank 1 ended with 1: Error") for seed in range(2)),
]


def rows(text: str) -> dict[str, str]:
    return {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line}


def test_the_table_compares_with_the_best_plain_side_of_the_same_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = module("results_table", monkeypatch).table(CELLS, None)
    row = rows(shown)
    assert "never" in row["gloo"]  # 0.4 at the end, and the target is 0.5
    assert row["fp16"].split()[5] == "8.0"
    assert row["gloo"].endswith("never – – 0.400")
    assert "3.0 (2.0–4.0) 3.00 × (2.00–4.00) it stopped" in row["tailcut"]
    assert row["powersgd"].startswith("powersgd (stopped in 2 of 2)")
    assert "powersgd, seed 1: stopped after 10 s: rank 1 ended with 1: Error" in shown


def test_who_trains_alone_is_a_floor_of_steps_and_no_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows(module("results_table", monkeypatch).table([*CELLS, cell("alone", 0, 0.9)], None))
    assert row["alone"].endswith("– – – –")
    assert row["fp16"].split()[5] == "8.0"


def test_a_target_may_be_chosen_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows(module("results_table", monkeypatch).table(CELLS, 0.25))
    assert row["fp16"].split()[5] == "4.0"


def test_figures_at_the_end_are_compared_by_pairs_of_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(side: str, seed: int, figure: float, equal: bool = True) -> dict[str, Any]:
        return {**cell(side, seed, 0.1), "figure": figure, "replicas_equal": equal}

    cells = [
        *(trained("lossless", seed, 0.8 + seed / 100) for seed in range(3)),
        *(trained("tailcut", seed, 0.81 + 2 * seed / 100, equal=not seed) for seed in range(3)),
        cell("tailcut", 3, 0.1, "rank 1 ended with 1"),
    ]
    differences = module("results_table", monkeypatch).differences
    _, line = differences("lossless", cells).splitlines()
    assert line == "clean, tailcut: +0.0200 (-0.0048 to +0.0448), 3 seeds; replicas equal at the end of 1"
    assert differences("gloo", cells) == ""


def test_the_page_has_the_ratios_the_commit_and_what_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"conditions": CONDITIONS, "machine": MACHINE, "cells": CELLS}
    text = module("results_page", monkeypatch).page([document], None, ["run.json"])
    assert "## cnn: Fashion-MNIST" in text
    assert "| clean | fp16 | 8.0 s | never | 3.0 s (2.0–4.0) | 3.00 × (2.00–4.00) | it stopped |" in text
    assert "| ≥ 3.75 × (2.50–5.00) |" in text  # than Gloo, which did not get there in 10 s
    assert "Commit abc." in text
    assert "- powersgd, seed 0: stopped after 10 s: rank 1 ended with 1: Error" in text


def test_a_book_goes_on_where_it_was_and_only_under_the_same_conditions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    book_type = module("results_book", monkeypatch).Book
    path = tmp_path / "run.json"
    book_type.open(path, CONDITIONS, MACHINE).add(CELLS[0])
    again = book_type.open(path, CONDITIONS, MACHINE)
    assert ("clean", "bbr", 0, "gloo") in again
    assert ("clean", "bbr", 1, "gloo") not in again
    again.forget([("clean", "bbr", 0, "gloo")])
    assert book_type.read(path)["cells"] == []
    with pytest.raises(
        ConfigError, match=r"another conditions \(seconds 10.0, not 20.0\): name another --json"
    ):
        book_type.open(path, {**CONDITIONS, "seconds": 20.0}, MACHINE)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root for namespaces and BPF")
def test_a_matrix_on_a_testbed_is_not_run_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("torch", "sklearn"):
        pytest.importorskip(name)
    file = tmp_path / "run.json"
    options = "--scenarios clean --hosts 2 --sides tailcut:planes=4 --seeds 1 --model mlp --seconds 1"
    words = ["time_to_accuracy", *options.split(), "--eval-every", "0.2", "--json", str(file)]
    benchmark = module("time_to_accuracy", monkeypatch)
    monkeypatch.setattr(sys, "argv", words)
    said = []
    for _ in range(2):
        benchmark.main()
        said.append(capsys.readouterr())
    assert "1 cells, 0 of them in" in said[0].err
    assert "1 cells, 1 of them in" in said[1].err
    assert said[0].out == said[1].out
    document = json.loads(file.read_text())
    assert document["machine"]["cores"] >= 1
    [measured] = document["cells"]
    assert measured["failed"] is None
    assert measured["steps"] >= 5
    assert measured["replicas_equal"]
    assert "ops" in measured["stats_text"]
