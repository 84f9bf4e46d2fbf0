"""``tailcut sim``: every scenario runs, the table says what happened, mistakes are explained."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tailcut.errors import ConfigError
from tailcut.tools.cli import main
from tailcut.tools.sim import Options, Row, run
from tailcut.tools.sim.figures import Side, prefix_weight, trimmed_weight
from tailcut.tools.sim.translate import conditions_of
from tailcut.tools.testbed import load_scenario, parse_scenario, shipped_names

SMALL = 1 << 18


def only(name: str = "clean", **options: object) -> Row:
    chosen = {"size_bytes": SMALL, "ops": 20, **options}
    (row,) = run(Options(scenario=load_scenario(name), **chosen))
    return row


@pytest.mark.parametrize("name", shipped_names())
def test_every_scenario_runs_in_virtual_time(name: str) -> None:
    row = only(name, against=("ring",), compute_s=0.6)  # longer than until the last fault
    own = row.sides["tailcut"]
    assert own.unfinished == 0
    assert own.percentile_s(100) <= row.deadline_s + 1e-9 or name == "straggler"


def test_a_clean_network_delivers_everything_near_the_bound() -> None:
    row = only(against=("ring", "tree"), size_bytes=4 << 20, ops=30, warmup=15)
    own, ring, tree = (row.sides[name] for name in ("tailcut", "ring", "tree"))
    assert own.delivered > 0.99  # bounds are still being learned
    assert own.nmse < 0.01
    assert own.goodput > 0.9
    assert ring.goodput > 0.9
    assert tree.goodput > 0.5
    assert 1 <= own.tail < 1.1


def test_loss_is_told_by_source() -> None:
    lossy = only("lossy-1").sides["tailcut"]
    assert lossy.losses.lost == pytest.approx(0.01, rel=0.3)
    assert lossy.losses.trimmed == lossy.losses.queue == 0
    trimmed = only("trim-50", codec="planes").sides["tailcut"]
    assert trimmed.losses.trimmed > 0.4
    dark = only("link-down", ops=40, compute_s=0.3).sides["tailcut"]
    assert dark.losses.dropped_rank > 0


def test_a_dead_rank_stops_a_ring_and_not_tailcut() -> None:
    row = only("dead-rank", against=("ring",), compute_s=0.6)
    assert row.sides["tailcut"].unfinished == 0
    assert row.sides["ring"].unfinished > 0
    assert row.sides["ring"].percentile_s(100) == float("inf")
    assert row.sides["ring"].delivered < 1


@pytest.mark.parametrize("name", shipped_names())
def test_another_rate_is_that_of_the_ports_and_changes_nothing_else(name: str) -> None:
    options = Options(scenario=load_scenario(name), ranks=(8,), rate_bytes_per_s=1.25e9, seed=3)
    slow = conditions_of(replace(options.scenario, seed=3), ranks=8, until_s=100)
    fast = conditions_of(options.simulated, ranks=8, until_s=100)
    rates = {"bytes_per_s": 1.25e9, "uplink_bytes_per_s": 1.25e9}
    assert fast == replace(slow, network=replace(slow.network, **rates))


def test_a_run_that_ends_before_the_fault_of_its_scenario_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["sim", "dead-rank", "--size", "64K", "--ops"]
    assert main([*words, "10"]) == 2
    said = capsys.readouterr().err
    assert "dead-rank has a fault at 10 s, and the run ended after 0.0" in said
    enough = said.split("give --ops ")[1].split()[0]
    assert main([*words, enough]) == 0


def test_the_wan_lies_between_the_halves_of_the_ranks() -> None:
    wan = conditions_of(load_scenario("cross-dc"), ranks=6, until_s=0).network.wan
    assert wan is not None
    assert wan.second_site == 3
    assert wan.bytes_per_s == 50e6 / 8


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lossy-1", {}),
        ("clean", {"codec": "planes", "planes": 3}),
        ("lossy-1", {"codec": "planes", "planes": 6}),
        ("trim-50", {"codec": "planes", "planes": 16}),
        ("trim-50", {}),
    ],
)
def test_the_predicted_error_is_close_to_the_measured_one(name: str, options: dict[str, object]) -> None:
    measured = only(name, values=True, ops=80, **options).sides["tailcut"]
    predicted = only(name, ops=80, **options).sides["tailcut"]
    assert measured.nmse_is_measured
    assert not predicted.nmse_is_measured
    assert predicted.nmse == pytest.approx(measured.nmse, rel=0.3)  # raw at 1 % loss: of a few packets


def test_a_quantizer_of_more_bits_errs_less() -> None:
    weights = [prefix_weight(planes) for planes in range(17)]
    assert weights == sorted(weights)
    assert 1 / weights[1] - 1 == pytest.approx(np.pi / 2 - 1, rel=0.001)
    assert weights[0] == 0


def test_what_is_left_of_a_packet_weighs_as_its_bits_do() -> None:
    assert trimmed_weight(10, 16, 80) == prefix_weight(1)
    assert trimmed_weight(10, 16, 120) == pytest.approx((prefix_weight(1) + prefix_weight(2)) / 2)
    assert trimmed_weight(10, 2, 400) == prefix_weight(2)


def test_percentiles_count_what_never_ended() -> None:
    side = Side(times_s=np.arange(1.0, 98.0), bound_s=1.0, unfinished=3)
    assert side.percentile_s(50) == 50
    assert side.percentile_s(97) == 97
    assert side.percentile_s(99) == float("inf")


def test_the_table_and_the_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    words = ["sim", "lossy-1", "--ranks", "2,4", "--size", "64K", "--ops", "20", "--against", "ring,tree"]
    assert main([*words, "--seed", "7", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    document = json.loads(file.read_text())
    assert [row["ranks"] for row in document["rows"]] == [2, 4]
    for row in document["rows"]:
        assert list(row["sides"]) == ["tailcut", "ring", "tree"]
        for name, side in row["sides"].items():
            assert len(side["times_s"]) == 18 * row["ranks"]
            assert f"{row['ranks']:>6} {name:<10}{1e3 * side['p50_s']:>13.3f}" in shown
    assert "the first 2 do not count" in shown
    assert main([*words, "--seed", "7"]) == 0
    assert capsys.readouterr().out == shown


def test_a_plot_is_drawn_and_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for file in (first, second):
        words = ["sim", "clean", "--size", "64K", "--ops", "10", "--against", "ring", "--plot", str(file)]
        assert main(words) == 0
    assert first.read_text().startswith("<?xml")
    assert first.read_text() == second.read_text()


def test_without_matplotlib_a_plot_is_refused_before_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["sim", "clean", "--plot", str(tmp_path / "a.svg")]) == 2
    shown = capsys.readouterr()
    assert "pip install 'tailcut[plot]'" in shown.err
    assert not shown.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clear"], "there is no scenario 'clear'"),
        (["clean", "--ranks", "1"], "ranks=1 must be between 2 and 4096"),
        (["clean", "--size", "1023"], "multiple of 4"),
        (["clean", "--ops", "5", "--warmup", "5"], "more than warmup=5"),
        (["clean", "--against", "star"], "there are ring, tree"),
        (["clean", "--mtu", "100"], "mtu_bytes = 100 must be between 576 and 9000"),
        (["clean", "--values", "--ranks", "1024"], "more than 4 GB"),
        (["dead-rank", "--ranks", "2"], "rank 2"),
        (["clean", "--json", "/nowhere/run.json"], "cannot write /nowhere/run.json"),
        (["clean", "--plot", "run.txt"], "must end in .svg"),
        (["clean", "--planes", "17"], "planes=17"),
    ],
)
def test_mistakes_are_explained(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_scenario_of_ones_own_can_lose_in_bursts() -> None:
    text = "[switch.bursty_loss]\nenter_frac = 0.01\nleave_frac = 0.2\n"
    scenario = parse_scenario(text, "own")
    (row,) = run(Options(scenario=scenario, size_bytes=SMALL, ops=20))
    assert row.sides["tailcut"].losses.lost == pytest.approx(0.01 / 0.21, rel=0.4)


def test_ctrl_c_ends_a_long_simulation_at_once() -> None:
    command = [sys.executable, "-m", "tailcut.tools.cli", "sim", "clean", "--ranks", "8", "--ops", "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr
        assert process.stderr.readline() == "8 ranks, tailcut\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(60) == 130
        finally:
            process.kill()
        assert "interrupted" in process.stderr.read()


def test_options_are_checked_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="rate"):
        Options(scenario=load_scenario("clean"), rate_bytes_per_s=-1.0)
