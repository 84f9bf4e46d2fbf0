"""``tailcut ledger``: a run on one screen, one op, where two runs part, and tables that others read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest

from tailcut import Ledger, Scenario, Simulation, simulate
from tailcut.ledger.frames import Frame, framed, read
from tailcut.ledger.records import Kind, json_payload, op_head, start_payload
from tailcut.ledger.runs import Latecomers, fates_of
from tailcut.report import Report
from tailcut.tools.cli import main
from tailcut.tools.ledger.difference import differences
from tailcut.tools.ledger.export import FORMS, export
from tailcut.tools.ledger.summary import summarize

RUN = "run.00000000abcd"

BAD_LINK = Scenario(
    ranks=4,
    length=60_000,
    ops=30,
    buckets=1,
    codec="planes",
    planes=6,
    record=True,
    loss=0.03,
    trim=0.05,
    trim_bytes=256,
    deadline_s=0.01,
    seed=7,
)


def write(simulation: Simulation, directory: Path, **about: object) -> Path:
    """What the ranks of a simulated run would have left."""
    scenario = simulation.scenario
    directory.mkdir()
    for rank, reports in enumerate(simulation.native.reports):
        start = {
            "rank": rank,
            "ranks": scenario.ranks,
            "rows": 1,
            "hosts": scenario.ranks,
            "codec": scenario.codec,
            "packet_bytes": [scenario.packet_bytes] * scenario.ranks,
            "config": {"budget": scenario.budget, "seed": scenario.seed},
            **dict.fromkeys(("tailcut", "machine", "numpy"), "1.0"),
            **about,
        }
        payloads = [(Kind.START, start_payload(start))]
        payloads += [
            (Kind.OP, op_head(0, outcome.verdicts) + native.record())
            for native, outcome in zip(reports, simulation.outcomes[rank], strict=True)
            if isinstance(outcome, Report)
        ]
        payloads.append((Kind.NOTE, json_payload({"event": "resync", "at_s": 1.0, "step": 3})))
        payloads.append((Kind.END, b"{}"))
        content = b"".join(framed(kind, number, payload) for number, (kind, payload) in enumerate(payloads))
        (directory / f"{RUN}.rank{rank:04d}.ledger").write_bytes(content)
    return directory


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return simulate(BAD_LINK)


@pytest.fixture(scope="module")
def run(simulation: Simulation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(simulation, tmp_path_factory.mktemp("ledger") / "run")


# ---- fates by name


def test_every_granule_of_an_op_has_exactly_one_fate(run: Path) -> None:
    ledger = Ledger.open(run)
    named: set[str] = set()
    for rank in ledger.ranks.values():
        late = Latecomers(rank)
        for record in rank.ops:
            places: dict[tuple[str, int], int] = {}
            for fate in fates_of(record, late):
                place = (fate.stage, fate.source if fate.stage == "scatter" else fate.shard)
                assert fate.first == places.get(place, 0) < fate.last
                places[place] = fate.last
                named.add(fate.fate)
            own = record.fates.granules[record.own_shard]
            assert [places["scatter", peer] for peer in range(4)] == [own] * 4
    assert {"full", "trimmed", "late"} <= named


def test_what_the_tables_say_is_missing_is_what_the_reports_say(simulation: Simulation, run: Path) -> None:
    ledger = Ledger.open(run)
    summary = summarize(ledger)
    for to in range(4):
        for source in range(4):
            links = [report.links[source] for report in simulation.reports(to)]
            missing = sum(link.scatter.missing + link.gather.missing for link in links)
            coords = sum(link.scatter.coords + link.gather.coords for link in links)
            if to != source:
                assert summary.missing[to][source] == pytest.approx(missing / coords)
    assert sum(map(sum, summary.missing)) > 0
    assert sum(map(sum, summary.trimmed)) > 0
    assert sum(map(sum, summary.carried)) > 0


# ---- show


def test_show_fits_on_one_screen_and_names_the_slowest_ops(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "show", str(run)]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 50
    ledger = Ledger.open(run)
    slowest = max(
        (op for rank in ledger.ranks.values() for op in rank.ops), key=lambda op: op.report.elapsed_s
    )
    assert f"{slowest.seq:>12} {slowest.rank:>8}" in text
    assert "30 ops of 1 buckets" in text
    assert "not in time, % of the coordinates of each link" in text
    assert "events: 4 × resync" in text
    assert "of 5.0% allowed" in text


def test_a_rank_whose_ledger_is_missing_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / f"{RUN}.rank0002.ledger").unlink()
    assert main(["ledger", "show", str(copy)]) == 0
    assert "not on record: rank 2: its ledger is not here" in capsys.readouterr().out


def test_one_op_is_shown_as_every_rank_saw_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger.open(run)
    used = next(op for op in ledger.ranks[1].ops if op.fates.uses)
    assert main(["ledger", "show", str(run), "--op", str(used.seq)]) == 0
    text = capsys.readouterr().out
    for rank in range(4):
        assert f"rank {rank}, owner of shard" in text
    assert f"{used.fates.mean_hash:016x}" in text
    assert "takes in granules" in text


def test_an_op_that_is_not_on_record_is_refused_with_those_that_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "show", str(run), "--op", "99"]) == 2
    assert "no rank has op 99 on record; there are ops 0 to 29" in capsys.readouterr().err


# ---- diff


@contextmanager
def changed_op(run: Path, rank: int, seq: int) -> Iterator[tuple[Path, bytearray]]:
    """A run in which one record is changed, with its checksum right."""
    path = run / f"{RUN}.rank{rank:04d}.ledger"
    frames = [frame for frame in read(path.read_bytes()) if isinstance(frame, Frame)]
    index = 1 + seq
    payload = bytearray(frames[index].payload)
    yield run, payload
    frames[index] = frames[index]._replace(payload=bytes(payload))
    path.write_bytes(b"".join(framed(f.kind, f.number, f.payload) for f in frames))


def test_two_ledgers_of_one_run_are_alike(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "diff", str(run), str(run)]) == 0
    assert capsys.readouterr().out == "the runs are alike in all 30 ops\n"


def test_other_gradients_are_told_from_other_fates(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    with changed_op(copy, 2, 11) as (_, payload):
        payload[-1] ^= 1  # of the hash, which stands last
    lines = list(differences(Ledger.open(run), Ledger.open(copy)))
    assert lines[0] == "the runs part at op 11"
    assert lines[1].startswith("rank 2: all fates are alike and the result is not: the gradients differ")


def test_a_run_with_another_network_parts_at_its_first_fate_that_differs(
    simulation: Simulation, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(simulate(BAD_LINK.__class__(**{**vars(BAD_LINK), "seed": 8})), tmp_path / "other")
    assert main(["ledger", "diff", str(run), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the runs part at op 0"
    assert "Config.seed: 7 and 8" in lines


# ---- export


def frame_of(path: Path) -> pd.DataFrame:
    readers = {".csv": pd.read_csv, ".parquet": pd.read_parquet}
    if path.suffix == ".json":
        return pd.read_json(path, lines=True)
    return readers[path.suffix](path)


@pytest.mark.parametrize("form", FORMS)
def test_pandas_loads_what_is_exported(simulation: Simulation, run: Path, tmp_path: Path, form: str) -> None:
    paths = export(Ledger.open(run), tmp_path, form)
    assert [path.name for path in paths] == [f"{name}.{form}" for name in ("ops", "links", "fates", "notes")]
    ops, links, fates, notes = map(frame_of, paths)
    assert len(ops) == 4 * 30
    assert len(links) == 4 * 4 * 30
    assert list(notes["event"]) == ["resync"] * 4
    assert json.loads(notes["values"][0]) == {"step": 3}
    for rank in range(4):
        reports = simulation.reports(rank)
        mine = ops[ops["rank"] == rank].sort_values("op")
        assert list(mine["received_packets"]) == [report.traffic.received_packets for report in reports]
        assert np.allclose(mine["lost_frac"], [report.lost_frac for report in reports])
        missing = links[links["rank"] == rank].groupby("op")["gather_missing"].sum()
        assert list(missing) == [report.gather.missing for report in reports]
    assert set(fates["fate"]) >= {"trimmed", "late"}
    taken_in = fates[fates["fate"] == "late"]
    assert (taken_in["taken_in"] > taken_in["op"]).all()


@pytest.mark.parametrize("form", FORMS)
def test_duckdb_loads_what_is_exported(run: Path, tmp_path: Path, form: str) -> None:
    export(Ledger.open(run), tmp_path, form)
    question = (
        "select l.peer, sum(l.gather_missing) from '{0}/links.{1}' l join '{0}/ops.{1}' o "
        "on l.rank = o.rank and l.op = o.op where o.status = 'partial' group by l.peer order by l.peer"
    )
    found = duckdb.sql(question.format(tmp_path, form)).fetchall()
    links = frame_of(tmp_path / f"links.{form}")
    wanted = links.groupby("peer")["gather_missing"].sum()
    assert {peer: total for peer, total in found if total} == {p: t for p, t in wanted.items() if t}


def test_export_says_where_the_tables_are_and_what_is_not_in_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / f"{RUN}.rank0000.ledger").unlink()
    assert main(["ledger", "export", str(copy), "--to", str(tmp_path / "out"), "--tables", "ops"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "not on record: rank 0: its ledger is not here",
        str(tmp_path / "out" / "ops.csv"),
    ]
