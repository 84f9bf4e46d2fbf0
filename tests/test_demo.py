"""tailcut.tools.demo: what it takes, what it says, and one short demo on loopback."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tailcut import ConfigError
from tailcut.tools import demo
from tailcut.tools.cli import main
from tailcut.tools.demo import freeze, stage
from tailcut.tools.demo.display import PLAIN, Log, Screen, cut
from tailcut.tools.demo.options import Options, data_of
from tailcut.tools.demo.results import Results
from tailcut.tools.demo.verdict import verdict
from tailcut.tools.demo.watch import Track, Watch, histogram, picture
from tailcut.tools.race import Cell, Outcome, ProgressReader, stream_of
from tailcut.tools.race.progress import ProgressWriter
from tests.demo_results import FACTS, SECONDS, recorded, results

# ---- what it takes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--workers", "1"], "--workers 1: one worker has nobody to average with"),
        (["--seeds", "0"], "--seeds 0: it takes at least 1"),
        (["--seconds", "0.5"], "--seconds 0.5: it takes 2 to 3600"),
        (["--seconds", "nan"], "--seconds nan: it takes 2 to 3600"),
        (["--scenario", "storm"], "there is no scenario 'storm'; there are"),
        (["--loopback", "--scenario", "tail-3"], "tail-3 needs a testbed's network, and --loopback has none"),
        (["--loopback", "--model", "vgg"], "there is no workload 'vgg'; there are cnn"),
        (["--loopback", "--data", "/nowhere"], "there is no train-images-idx3-ubyte.gz in /nowhere"),
        (["--scenario", "freeze", "--seeds", "2"], "has a script of its own and takes no --seeds"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    output = [] if "freeze" in words else ["--output", str(tmp_path)]
    assert main(["demo", *words, *output]) == 2
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_named_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "file"
    file.touch()
    for output in (file, file / "below", Path("/proc/tailcut-demo")):
        assert main(["demo", "--loopback", "--output", str(output)]) == 2
        assert f"--output {output}: cannot write there" in capsys.readouterr().err


def test_without_torch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tailcut\[demo\]'"):
        demo.run(Options(output=tmp_path), {}, io.StringIO())


def test_the_freeze_is_a_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(freeze, "run", lambda: calls.append("run"))
    assert main(["demo", "--scenario", "freeze"]) == 0
    assert calls == ["run"]


def test_data_is_as_given_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAILCUT_DATA", raising=False)
    assert data_of(None) is None
    monkeypatch.setenv("TAILCUT_DATA", "/data")
    assert data_of(None) == Path("/data")
    assert data_of("/other") == Path("/other")
    assert data_of("none") is None


def test_the_command_does_the_same_again() -> None:
    options = Options(data=Path("/my data"), workers=3, seconds=10.0, output=Path("somewhere"))
    assert options.command("tail-3") == (
        "tailcut demo --scenario tail-3 --model cnn --data '/my data' --workers 3 --seeds 1 --seconds 10"
    )


# ---- where it takes place ---------------------------------------------------------------------------------


def no_testbed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConfigError("no namespaces here")

    monkeypatch.setattr(stage, "become_root_of_a_namespace", refuse)
    monkeypatch.setattr(stage, "PROGRAMS", ())


def test_without_a_testbed_there_are_stragglers_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    no_testbed(monkeypatch)
    chosen = stage.choose(Options(workers=3))
    assert (chosen.scenario.name, chosen.scenario.hosts, chosen.loopback) == ("straggler", 3, True)
    said = "\n".join(demo.introduction(Options(), chosen, "digits"))
    assert "NOTE: No testbed could be built here (no namespaces here). This is loopback" in said


def test_without_a_testbed_a_named_scenario_of_the_network_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_testbed(monkeypatch)
    with pytest.raises(ConfigError, match=r"bursts needs a testbed's network.*no namespaces here"):
        stage.choose(Options(scenario="bursts"))
    assert stage.choose(Options(scenario="dead-rank")).loopback


# ---- the verdict ------------------------------------------------------------------------------------------


def verdict_of(directory: Path, **slopes: float) -> str:
    runs = [recorded(directory / side, side, slope) for side, slope in slopes.items()]
    return verdict(Results(runs, SECONDS))


@pytest.mark.parametrize(
    ("slopes", "words"),
    [
        (
            {"gloo": 0.02, "fp16": 0.04, "tailcut": 0.08},
            "tailcut reached 60.0 % after 7.5 s, Gloo with fp16 after 15.0 s (2.0 x), "
            "Gloo not within 20 s (more than 2.7 x)",
        ),
        (
            {"gloo": 0.04, "fp16": 0.08, "tailcut": 0.04},
            "tailcut reached 60.0 % after 15.0 s, Gloo with fp16 after 7.5 s (0.50 x: tailcut was slower), "
            "Gloo after 15.0 s (the same)",
        ),
        (
            {"gloo": 0.02, "fp16": 0.04, "tailcut": 0.02},
            "60.0 %: tailcut did not within 20 s, Gloo with fp16 after 15.0 s, Gloo not within 20 s",
        ),
        (  # nobody reaches the target: the best that tailcut and a rival reached
            {"gloo": 0.01, "fp16": 0.02, "tailcut": 0.025},
            "tailcut reached 38.0 % after 15.2 s, Gloo with fp16 after 19.0 s (1.2 x), "
            "Gloo not within 20 s (more than 1.3 x)",
        ),
    ],
)
def test_the_verdict_has_numbers_whichever_way_it_went(
    slopes: dict[str, float], words: str, tmp_path: Path
) -> None:
    assert verdict_of(tmp_path, **slopes) == words


def test_the_verdict_names_who_stopped(tmp_path: Path) -> None:
    reason = "rank 1 ended with 1: RuntimeError"
    assert verdict(results(tmp_path / "rival", gloo=reason)).endswith(f"Gloo stopped ({reason})")
    said = verdict(results(tmp_path / "late", fp16=reason))
    assert f"Gloo with fp16 after 15.0 s (2.0 x), then Gloo with fp16 stopped ({reason})" in said
    early = [recorded(tmp_path / side, side, 0.04) for side in ("gloo", "fp16")]
    early.append(recorded(tmp_path / "own", "tailcut", 0.08, failed=reason, seconds=5))
    assert verdict(Results(early, SECONDS)) == (
        f"60.0 %: tailcut stopped ({reason}), Gloo after 15.0 s, Gloo with fp16 after 15.0 s"
    )


def test_without_evaluations_there_is_no_verdict_and_the_reasons_are_named(tmp_path: Path) -> None:
    runs = [
        recorded(tmp_path / side, side, 0.1, failed=failed, seconds=0 if failed else 1)
        for side, failed in (("gloo", "not done after 90 s"), ("fp16", None), ("tailcut", "rank 2 died"))
    ]
    assert verdict(Results(runs, SECONDS)) == (
        "no verdict: Gloo stopped (not done after 90 s); Gloo with fp16 has too few evaluations; "
        "tailcut stopped (rank 2 died)"
    )


def test_a_loss_is_compared_from_above(tmp_path: Path) -> None:
    facts = {**FACTS, "figure": "validation loss", "higher_is_better": False, "target": 2.4}
    runs = [
        recorded(tmp_path / side, side, slope, facts=facts)
        for side, slope in (("gloo", 0.02), ("fp16", 0.04), ("tailcut", 0.08))
    ]
    assert verdict(Results(runs, SECONDS)).startswith(
        "tailcut reached a validation loss of 2.400 after 7.5 s, Gloo with fp16 after 15.0 s (2.0 x)"
    )


def test_seeds_count_by_their_median(tmp_path: Path) -> None:
    runs = [
        recorded(tmp_path / f"{side}-{seed}", side, slope, seed=seed)
        for side, slopes in {"gloo": (0.04, 0.04, 0.04), "tailcut": (0.04, 0.08, 0.08)}.items()
        for seed, slope in enumerate(slopes)
    ]
    assert verdict(Results(runs, SECONDS)) == "tailcut reached 60.0 % after 7.5 s, Gloo after 15.0 s (2.0 x)"


# ---- the display ------------------------------------------------------------------------------------------


def test_the_picture_has_every_side_its_steps_and_its_budget(tmp_path: Path) -> None:
    tracks = []
    for side in ("gloo", "tailcut"):
        track = Track(side, 0)
        recorded(tmp_path / side, side, 0.04 if side == "tailcut" else 0.02)
        track.add(ProgressReader(stream_of(0, tmp_path / side)).look())
        tracks.append(track)
    text = "\n".join(picture(tracks, SECONDS))
    assert "accuracy against time" in text
    assert text.count("o\x1b[0m") > SECONDS / 2
    assert text.count("#\x1b[0m") > SECONDS / 2
    assert "20 steps, accuracy 80.0 %, p50  250 ms, p99  600 ms, 3.0 of the budget's 5 % spent" in text
    assert histogram([0.001, 0.001, 9.0]) == "█" + " " * 14 + "▄"


def test_a_log_has_news_every_few_seconds_and_at_the_end(tmp_path: Path) -> None:
    stream, now = io.StringIO(), [0.0]
    watch = Watch(Log(stream), SECONDS, clock=lambda: now[0])
    watch.begin("gloo", 0, tmp_path)
    for now[0] in (6.0, 12.0):
        watch.look()  # nothing has changed
    progress = ProgressWriter(stream_of(0, tmp_path))
    progress.say(facts=FACTS)
    for tenth in range(100):
        now[0] = 20 + tenth / 10
        progress.say(step=tenth + 1, at_s=tenth / 10, step_s=0.1, loss=1.0)
        watch.look()
    progress.close()
    watch.end("rank 1 ended with 1")
    said = stream.getvalue().splitlines()
    assert said[0] == "Gloo: starting"
    assert len(said) == 4  # at 20, 25 and at the end
    assert said[-1].endswith("stopped: rank 1 ended with 1")


def test_a_screen_redraws_in_place_and_cuts_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "11")
    monkeypatch.setenv("LINES", "4")
    stream = io.StringIO()
    screen = Screen(stream)
    screen.show(["gone", "a" * 30, "b", "c"])
    first = stream.getvalue()
    assert first == f"\x1b[K{'a' * 10}\n\x1b[Kb\n\x1b[Kc\n\x1b[J"
    screen.show(["d"])
    assert stream.getvalue()[len(first) :] == "\x1b[3A\x1b[Kd\n\x1b[J"
    assert cut(f"ab\x1b[34mcd{PLAIN}ef", 3) == f"ab\x1b[34mc{PLAIN}"


# ---- one short demo ---------------------------------------------------------------------------------------


def test_a_short_demo_on_loopback_ends_with_report_and_verdict(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    stream = io.StringIO()
    options = Options(model="mlp", workers=2, seconds=2.0, loopback=True, output=tmp_path)
    found = demo.run(options, {"cpu": "some"}, stream)
    assert [run.side for run in found.runs] == ["gloo", "fp16", "tailcut"]
    assert not any(found.failures(side) for side in found.sides)
    text = stream.getvalue()
    assert "mlp on scikit-learn's digits" in text
    assert "This is loopback, which has no slow links" in text
    assert text.splitlines()[-1] == verdict(found)
    page = (tmp_path / "report.html").read_text()
    assert "--model mlp --data none --workers 2 --seeds 1 --seconds 2 --loopback" in page
    assert 'id="late-means"' in page


def test_a_side_that_dies_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    cells = []

    def run_cell(cell: Cell, directory: Path, look: Callable[[], None]) -> Outcome:
        look()
        cells.append((cell.side.name, cell.seed, cell.course.seconds, cell.course.loopback))
        failed = "rank 1 ended with 1: RuntimeError" if cell.side.name == "fp16" else None
        return recorded(directory, cell.side.name, 0.04, failed=failed).outcome

    monkeypatch.setattr(demo, "run_cell", run_cell)
    stream = io.StringIO()
    output = tmp_path / "report"
    for _ in range(2):  # the second finds what the first has left
        cells.clear()
        options = Options(model="mlp", seeds=2, seconds=20.0, loopback=True, output=output)
        demo.run(options, {}, stream)
    assert cells == [
        (side, seed, 20.0, True)
        for seed, sides in enumerate((("gloo", "fp16", "tailcut"), ("fp16", "tailcut", "gloo")))
        for side in sides
    ]
    assert "Gloo with fp16 stopped in 2 of 2 runs (rank 1 ended" in stream.getvalue().splitlines()[-1]
    assert "Gloo with fp16, seed 1, stopped: rank 1 ended" in (output / "report.html").read_text()


@pytest.mark.long
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    words = ["-m", "tailcut.tools.cli", "demo", "--loopback", "--model", "mlp", "--workers", "2"]
    with subprocess.Popen(
        [sys.executable, *words, "--seconds", "600", "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        for line in process.stdout:
            if "steps" in line:
                break
        assert len(_processes_of(tmp_path)) > 1
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate()
    assert process.returncode == 130
    assert "tailcut: interrupted" in complaint
    assert _processes_of(tmp_path) == []


def _processes_of(directory: Path) -> list[int]:
    """Those that have the directory in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(directory).encode() in command:
                found.append(int(entry.name))
    return found
