"""What a ledger gives to programs that watch a run: a trace, Prometheus' metrics, scalars, a dashboard."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailcut import Ledger, Report
from tailcut.tools.cli import main
from tests.groups import allreduce, open_groups, vectors

OPS = 6


@pytest.fixture(scope="module")
def told() -> list[list[Report]]:
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, told: list[list[Report]]) -> Path:
    directory = tmp_path_factory.mktemp("run")
    with open_groups(directory / "store", 2, ledger=str(directory), codec="planes", planes=5) as groups:
        told += [allreduce(groups, vectors(2, 3000, op), key="weights") for op in range(OPS)]
        groups[0]._ops.ledger.note("correction", step=2)
    return directory


def test_the_trace_has_a_span_for_every_op_with_its_stages_inside(
    run: Path, told: list[list[Report]], tmp_path: Path
) -> None:
    assert main(["ledger", "trace", str(run), "--to", str(tmp_path / "trace.json")]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    about = Ledger.open(run).about
    for rank in range(2):
        events = [event for event in trace["traceEvents"] if event["pid"] == rank]
        ops = [e for e in events if e["ph"] == "X" and e["name"].startswith("op ")]
        assert [e["name"] for e in ops] == [f"op {seq} weights" for seq in range(OPS)]
        assert np.allclose([e["dur"] for e in ops], [1e6 * op[rank].elapsed_s for op in told], atol=2)
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(ops))
        assert 0 <= ops[0]["ts"] / 1e6 - about["started_unix_s"] < 60  # the wall clock
        for stage in (e for e in events if e["name"] in ("SCATTER", "GATHER")):
            begin, end = stage["ts"], stage["ts"] + stage["dur"]
            assert any(o["ts"] - 2 <= begin and end <= o["ts"] + o["dur"] + 2 for o in ops)
    assert any(e["ph"] == "i" and e["name"] == "correction" for e in trace["traceEvents"])


def samples(path: Path) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(path.read_text())
    }


def test_prometheus_reads_the_metrics(run: Path, told: list[list[Report]], tmp_path: Path) -> None:
    path = tmp_path / "tailcut.prom"
    assert main(["ledger", "prometheus", str(run), "--to", str(path)]) == 0
    assert list(tmp_path.iterdir()) == [path]
    found = samples(path)
    for rank in range(2):
        reports = [op[rank] for op in told]
        received = sum(report.traffic.received_packets for report in reports)
        assert found["tailcut_ops"][str(rank), "complete"] == OPS
        assert found["tailcut_packets"][str(rank), "received"] == received
        coords = sum(report.links[1 - rank].scatter.coords for report in reports)
        assert found["tailcut_coordinates"][str(rank), str(1 - rank), "scatter"] == coords
        assert found["tailcut_planes"][str(rank), "scatter"] == 5
        quantized = sum(report.epsilon.quantized for report in reports) / OPS
        assert found["tailcut_epsilon_ratio"][str(rank), "quantized"] == pytest.approx(quantized, rel=1e-3)
    assert found["tailcut_events"]["0", "correction"] == 1
    assert found["tailcut_budget_ratio"][()] == 0.05


def test_tensorboard_reads_the_scalars(run: Path, told: list[list[Report]], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    assert main(["ledger", "tensorboard", str(run), "--to", str(tmp_path)]) == 0
    for rank in range(2):
        (file,) = (tmp_path / f"rank{rank}").iterdir()
        values = [
            (event.step, value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value)
            for event in EventFileLoader(str(file)).Load()
            for value in event.summary.value
            if value.tag == "tailcut/elapsed_ms"
        ]
        assert [step for step, _ in values] == list(range(OPS))
        assert np.allclose([ms for _, ms in values], [1e3 * op[rank].elapsed_s for op in told], atol=0.01)


def test_the_dashboard_asks_only_for_metrics_that_there_are(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "dashboard"]) == 0
    dashboard = json.loads(capsys.readouterr().out)
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"tailcut_\w+", target["expr"])
    }
    main(["ledger", "prometheus", str(run), "--to", str(tmp_path / "m")])
    written = {line.split()[2] for line in (tmp_path / "m").read_text().splitlines() if "# TYPE" in line}
    assert asked
    assert asked <= written


def test_every_metric_is_documented(run: Path, tmp_path: Path) -> None:
    main(["ledger", "prometheus", str(run), "--to", str(tmp_path / "m")])
    page = (Path(__file__).parents[1] / "docs" / "ledger.md").read_text()
    for line in (tmp_path / "m").read_text().splitlines():
        if line.startswith("# TYPE"):
            assert f"`{line.split()[2]}`" in page
