"""tailcut.tools.race: sides, progress, figures, and cells on loopback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tailcut import Config, ConfigError
from tailcut.pytorch.hooks import no_exchange_hook
from tailcut.tools.race import (
    PRESETS,
    Cell,
    Course,
    Outcome,
    ProgressReader,
    figure_at,
    figures_of,
    parse_side,
    parse_sides,
    reached_s,
    run_cell,
    stream_of,
)
from tailcut.tools.race.progress import ProgressWriter
from tailcut.tools.testbed import load_scenario
from tailcut.tools.testbed.scenario import HostFreeze, Kill

# ---- sides ------------------------------------------------------------------------------------------------


def test_settings_belong_to_the_side_before_them() -> None:
    sides = parse_sides("tailcut,tailcut:planes=4,resend=0,deadline_s=2,codec=raw,fp16")
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
def test_what_is_wrong_with_a_side_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_sides(text)


def test_presets_are_tailcut_with_fields_of_its_config() -> None:
    for name, fields in PRESETS.items():
        side = parse_side(name)
        assert (side.kind, side.config) == ("tailcut", fields)
        Config(**fields)
    assert parse_side("optireduce").measured_deadline
    assert not parse_side("tailcut").measured_deadline


def test_lossless_is_gloo_without_the_network() -> None:
    side = parse_side("lossless")
    assert (side.kind, side.on_loopback) == ("gloo", True)


# ---- progress and figures ---------------------------------------------------------------------------------


def test_alone_every_rank_keeps_its_own_gradients() -> None:
    gradients = torch.arange(4.0)
    bucket = SimpleNamespace(buffer=lambda: gradients)
    assert torch.equal(no_exchange_hook(None, bucket).wait(), torch.arange(4.0))
    assert parse_side("alone").kind == "alone"


def test_a_reader_gets_every_line_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = stream_of(0, tmp_path)
    reader = ProgressReader(path)
    assert reader.look() == []
    writer = ProgressWriter(path)
    writer.say(step=1)
    writer.close()
    assert reader.look() == [{"step": 1}]
    with path.open("a") as file:
        file.write('{"step": 2')
    assert reader.look() == []
    with path.open("a") as file:
        file.write("}\n")
    assert reader.look() == [{"step": 2}]
    assert reader.look() == []


def test_a_target_is_reached_when_three_evaluations_in_a_row_say_so_on_average() -> None:
    lucky = [(1, 1.0, 0.1), (2, 2.0, 0.9), (3, 3.0, 0.2), (4, 4.0, 0.3), (5, 5.0, 0.4)]
    assert reached_s(lucky, 0.5, True) is None
    rising = [(n, float(n), n / 10) for n in range(1, 8)]
    assert reached_s(rising, 0.35, True) == pytest.approx(3.5)
    falling = [(n, float(n), 1 - n / 10) for n in range(1, 8)]
    assert reached_s(falling, 0.65, False) == pytest.approx(3.5)
    assert figure_at(3.5, rising) == pytest.approx(0.35)
    assert figure_at(0.5, rising) is None


def test_figures_are_over_the_steps_of_all_ranks() -> None:
    steps = {rank: [{"step": 1, "at_s": 1.0 + rank, "step_s": 1.0 + rank}] for rank in range(2)}
    evaluations = [{"step": 1, "at_s": 1.0, "figure": 0.5}]
    figures = figures_of(Outcome("rank 1 ended with 1", steps, evaluations, {}, {}))
    assert (figures["failed"], figures["steps"], figures["lasted_s"]) == ("rank 1 ended with 1", 1, 1.0)
    assert (figures["p50_s"], figures["p99_s"]) == (1.0, 2.0)
    assert figures["evaluations"] == [(1, 1.0, 0.5)]
    assert "figure" not in figures


def test_host_0_is_not_killed() -> None:
    scenario = replace(load_scenario("dead-rank"), kills=(Kill(host=0, at_s=1.0),))
    with pytest.raises(ConfigError, match="kills host 0, which says when all stop"):
        Cell(side=parse_side("gloo"), scenario=scenario)


# ---- cells ------------------------------------------------------------------------------------------------

CLEAN = load_scenario("clean", hosts=2)
SHORT = Course(workload="mlp", seconds=1.0, eval_every_s=0.2, loopback=True)


def needs_torch() -> None:
    for module in ("torch", "sklearn"):
        pytest.importorskip(module)


def test_a_cell_on_loopback_is_followed_while_it_runs(tmp_path: Path) -> None:
    needs_torch()
    reader = ProgressReader(stream_of(0, tmp_path))
    seen: list[int] = []
    freeze = HostFreeze(host=1, at_s=0.1, for_s=0.1)
    cell = Cell(side=parse_side("tailcut"), scenario=replace(CLEAN, freezes=(freeze,)), course=SHORT)
    outcome = run_cell(cell, tmp_path, lambda: seen.append(len(reader.look())))
    assert outcome.failed is None
    assert sum(count > 0 for count in seen) > 1  # it came bit by bit
    assert outcome.facts["name"] == "mlp"
    assert outcome.evaluations[-1]["step"] == outcome.steps[0][-1]["step"]
    assert set(outcome.evaluations[-1]) >= {"figure", "at_s", "spent", "lost_frac"}
    figures = figures_of(outcome)
    assert figures["replicas_equal"]
    assert json.loads(json.dumps(figures))["figure"] > 0.3


def test_a_side_that_dies_gets_that_as_its_result(tmp_path: Path) -> None:
    needs_torch()
    kills = (Kill(host=1, at_s=0.3),)
    course = replace(SHORT, seconds=600)
    outcome = run_cell(
        Cell(side=parse_side("gloo"), scenario=replace(CLEAN, kills=kills), course=course), tmp_path
    )
    assert outcome.failed
    assert outcome.failed.startswith("rank 0 ended with 1")
    figures = figures_of(outcome)
    assert figures["steps"] > 0  # what it did before stays
    assert "figure" not in figures
