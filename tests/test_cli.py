"""The tailcut command: what it prints and how it exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from tailcut import PeerError
from tailcut.tools import demo
from tailcut.tools.cli import bench, main

QUICK = ["bench", "allreduce", "--ranks", "2", "--sizes", "1K", "--iters", "2", "--rounds", "1"]


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"tailcut {metadata.version('tailcut')}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["bench"], ["train"], [*QUICK, "--sizes", "1X"], [*QUICK, "--ranks", "a"]]
)
def test_arguments_that_are_not_understood_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: tailcut" in capsys.readouterr().err


def test_bench_codec_prints_rows_with_the_errors_of_the_table(tmp_path, capsys):
    path = tmp_path / "codec.json"
    assert main(["bench", "codec", "--size", "1M", "--rounds", "1", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["memcpy", "rotate", *["encode", "decode"] * 4]
    rows = json.loads(path.read_text())["rows"]
    errors = {row["planes"]: row["nmse"] for row in rows if row["name"] == "decode"}
    assert errors[1] == pytest.approx(0.571, rel=0.02)
    assert errors[4] == pytest.approx(0.00964, rel=0.02)
    assert errors[16] < 1e-8
    assert all(row["ns"] > 0 and row["memcpy_multiple"] > 0 for row in rows)


def test_bench_codec_needs_a_block_and_a_round(capsys):
    assert main(["bench", "codec", "--size", "1K"]) != 0
    assert "block" in capsys.readouterr().err
    assert main(["bench", "codec", "--rounds", "0"]) != 0
    assert "rounds=0" in capsys.readouterr().err


def test_bench_prints_rows_and_writes_json(tmp_path, capsys):
    path = tmp_path / "run.json"
    options = [
        "--json",
        str(path),
        "--deadline",
        "5",
        "--receive-buffer",
        "1M",
        "--packet-bytes",
        "1024",
        "--no-offload",
    ]
    assert main([*QUICK, *options]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.split()[:2] == ["1024", "256"]

    result = json.loads(path.read_text())
    config = result["options"]["config"]
    assert (config["deadline_s"], config["receive_buffer_bytes"]) == (5.0, 1 << 20)
    assert (config["packet_bytes"], config["offload"]) == (1024, False)
    assert result["machine"]["tailcut"] == metadata.version("tailcut")
    assert result["memcpy_bytes_per_s"] > 0
    (row,) = result["rows"]
    assert (row["ranks"], row["size_bytes"], row["count"], row["ratio"]) == (2, 1024, 256, None)
    figures = row["sides"]["tailcut"]
    assert (figures["delivered_frac"], figures["nmse"]) == (1.0, 0.0)
    assert [len(r["slowest_s"]) for r in figures["rounds"]] == [2]


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root for namespaces and BPF")
def test_bench_on_a_testbed_counts_what_is_on_the_wire(tmp_path, capsys):
    path = tmp_path / "run.json"
    rounds = ["--rounds", "5", "--iters", "2", "--warmup", "1", "--json", str(path)]
    size = ["--sizes", "256K", "--planes", "16"]
    arguments = ["bench", "allreduce", "--testbed", "clean", *size, "--against", "gloo", *rounds]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "# clean, 4 hosts at 200 Mbit/s" in shown
    assert "MB on the wire" in shown
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ranks"] == 4
    # Each of four ranks sends 2 x 3/4 of the bucket: as fp32 by TCP, as 16 planes by tailcut; and headers.
    assert row["sides"]["gloo"]["wire_bytes"] == pytest.approx(6 * 262144 * 1.06, rel=0.1)
    assert row["sides"]["tailcut"]["wire_bytes"] == pytest.approx(3 * 262144 * 1.09, rel=0.1)
    assert row["sides"]["tailcut"]["nmse"] < 1e-8
    assert row["ratio"]["wire_bytes"]["median"] == pytest.approx(1.95, rel=0.1)


@pytest.mark.parametrize(
    ("hook", "most"),
    [("fp16", 1e-6), pytest.param("bf16", 1e-4, marks=pytest.mark.long), ("powersgd", 2.0)],
)
def test_bench_against_the_hooks_of_torch(hook, most, tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = [*QUICK, "--rounds", "5", "--against", hook, "--json", str(path)]
    assert main(arguments) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert 0 < row["sides"][hook]["nmse"] < most


def test_bench_refuses_a_testbed_that_stops_its_processes(capsys):
    assert main(["bench", "allreduce", "--testbed", "straggler"]) == 2
    assert "tailcut testbed run straggler -- COMMAND" in capsys.readouterr().err
    assert main(["bench", "allreduce", "--testbed", "clean", "--ranks", "2,4"]) == 2
    assert "one number of hosts" in capsys.readouterr().err


def test_errors_are_one_line_and_exit_with_2(capsys):
    assert main([*QUICK, "--deadline", "-1"]) == 2
    assert capsys.readouterr().err.startswith("tailcut: deadline_s=-1.0 must be above 0")
    assert main([*QUICK, "--json", "/no/such/directory/run.json"]) == 2
    assert "cannot write /no/such/directory/run.json" in capsys.readouterr().err


def test_a_failing_worker_exits_with_2(monkeypatch, capsys):
    class Failing:
        def __iter__(self):
            raise PeerError("rank 1 was killed")

        def close(self):
            pass

    monkeypatch.setattr(bench, "run", lambda *_: Failing())
    assert main(QUICK) == 2
    assert capsys.readouterr().err.endswith("tailcut: rank 1 was killed\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_leaves_neither_process_nor_file(number, code, tmp_path):
    words = ["bench", "allreduce", "--sizes", "1K", "--iters", "100000000"]
    command = [sys.executable, "-m", "tailcut.tools.cli", *words]
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert b"starting" in process.stderr.readline()
        process.send_signal(number)
        # The end of the file comes when nobody who inherited it is left.
        process.communicate(timeout=60)
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_sizes_have_units():
    assert bench._sizes("4,1K,25M,1g") == (4, 1024, 25 << 20, 1 << 30)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "clean"], "no command to run: tailcut testbed run SCENARIO -- COMMAND"),
        (["run", "clear", "--", "true"], "there is no scenario 'clear'; there are bursts, clean,"),
        (["run", "/no/such.toml", "--", "true"], "cannot read the scenario /no/such.toml: No such file"),
        (
            ["run", "clean", "--hosts", "1", "--", "true"],
            "scenario clean: hosts = 1 must be between 2 and 64",
        ),
        (["up", "clear"], "there is no scenario 'clear'"),
        (["down", "1-1-0"], "there is no testbed 1-1-0"),
        (["status", "1-1-0"], "there is no testbed 1-1-0"),
        (["scenarios", "clear"], "there is no scenario 'clear'"),
    ],
)
def test_testbed_explains_what_it_cannot_do(arguments, complaint, capsys):
    assert main(["testbed", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_testbed_lists_and_prints_scenarios(capsys):
    assert main(["testbed", "scenarios"]) == 0
    assert "tail-3      Bursts of other traffic" in capsys.readouterr().out
    assert main(["testbed", "scenarios", "tail-3"]) == 0
    assert "ratio = 3.0" in capsys.readouterr().out


def test_a_command_after_two_dashes_is_for_testbed_run_only(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--", "true"])
    assert exit_info.value.code == 2
    assert "unrecognized arguments: -- true" in capsys.readouterr().err


@pytest.mark.parametrize(("failures", "status"), [([], 0), (["rank 1 died"], 1)])
def test_demo_runs_without_options_and_fails_with_tailcut(failures, status, monkeypatch):
    monkeypatch.delenv("TAILCUT_DATA", raising=False)
    calls = []

    def run(options, machine):
        calls.append(options)
        return SimpleNamespace(failures=lambda side: failures if side == "tailcut" else ["died"])

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo"]) == status
    assert calls == [demo.Options()]
