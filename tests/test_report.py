"""Reports: what the native side says, in seconds after the rank's own entry."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tailcut import Report, Scenario, TailcutError, _native, mirror, simulate
from tailcut.epsilon import Epsilon
from tailcut.grid import GridLayout
from tailcut.mirror import LateCompletion, Link, LinkStage, LrScale, StageReport, Traffic, plain, summed
from tailcut.report import Verdict, outcome_of
from tailcut.simulation.baseline import Baseline, simulate_baseline
from tailcut.simulation.run import elided_buckets, spec_of

MS = 1_000_000

STRUCTS = {
    "traffic": Traffic,
    "stage": StageReport,
    "link_stage": LinkStage,
    "link": Link,
    "late": LateCompletion,
    "lr_scale": LrScale,
}


def native(**fields: Any) -> Any:
    """The report of rank 1 of 3 on an op that it entered at 1 s, whose shard it had closed before."""
    values = {
        "status": "partial",
        "seq": 5,
        "place": 1,
        "column": [],
        "behind_ops": 0,
        "bucket_len": 300,
        "non_finite": False,
        "contributed": True,
        "carried": False,
        "entered_at": 1000 * MS,
        "ended_at": 1200 * MS,
        "scatter": StageReport(0, "bound", -0.1, -0.05, 300, 150),
        "gather": StageReport(0, "grace", 0.0, 0.2, 300, 10, 5),
        "links": (
            Link(-0.1, False, False, LinkStage(100, 0, 0, -0.06), LinkStage(100, 0, 5, 0.1), 10, 1, 0, 0),
            Link(0.0, False, False, LinkStage(100, 100), LinkStage(100), 0, 0, 3, 1),
            Link(None, True, False, LinkStage(100, 50), LinkStage(100, 10, 0, 0.19), 20, 0, 5, 0),
        ),
        "traffic": Traffic(*[7] * len(Traffic._fields)),
        "energies": _native.Energies(),
        "lr_scale": LrScale(0.0, 0),
        "late": (LateCompletion(3, "gather", 80, 0.04),),
        "carried_coords": 0,
        "late_coords": 12,
        "split_verdicts": 2,
        "epoch": 3,
        "heard_epoch": 4,
        "coding_carried": False,
        "stated_lengths": [],
    }
    return SimpleNamespace(**{**values, **fields})


def report(**fields: Any) -> Report:
    outcome = outcome_of(native(**fields), GridLayout(3), rank=1)
    assert isinstance(outcome, Report)
    return outcome


def test_what_the_native_side_has_of_stages_links_and_traffic_is_in_the_report() -> None:
    got, given = report(), native()
    assert (got.scatter, got.gather, got.links) == (given.scatter, given.gather, given.links)
    assert (got.traffic, got.late, got.late_coords) == (given.traffic, given.late, given.late_coords)
    assert got.split_verdicts == given.split_verdicts
    assert (got.epoch, got.heard_epoch) == (given.epoch, given.heard_epoch)
    assert got.elapsed_s == pytest.approx(0.2)
    assert got.lost_frac == pytest.approx(0.05)
    assert (got.status, got.ended_by) == ("partial", "grace")
    assert got.missing_from == (0, 1, 2)
    assert got.link(2) is got.links[2]


def test_stages_are_timed_from_their_own_starts() -> None:
    got = report()
    assert got.scatter.took_s == pytest.approx(0.05)
    assert got.gather.took_s == pytest.approx(0.2)
    assert StageReport(began_s=None, ended_s=0.1).took_s is None
    assert StageReport(began_s=0.2, ended_s=0.1).took_s == 0


def test_shares_are_of_what_should_have_come() -> None:
    got = report()
    assert [link.scatter.lost_frac for link in got.links] == [0, 1, 0.5]
    assert [link.gather.lost_frac for link in got.links] == [0, 0, 0.1]
    assert [link.gather.empty_frac for link in got.links] == [0.05, 0, 0]
    assert [link.sent_lost_frac for link in got.links] == [0.1, 0, 0]
    assert [link.received_lost_frac for link in got.links] == [0, 0.25, 0]
    assert (LinkStage().lost_frac, LinkStage().empty_frac) == (0, 0)
    assert (Link().sent_lost_frac, Link().received_lost_frac) == (0, 0)


def test_a_rank_that_abstained_is_missing_from_nothing_but_its_own_mean() -> None:
    gone = Link(None, abstained=True, scatter=LinkStage(100, 100), gather=LinkStage(100, 0, 100))
    assert report(links=(gone,) * 3).missing_from == ()
    silent = gone._replace(gather=LinkStage(100, 1))
    assert report(links=(gone, gone, silent)).missing_from == (2,)


def test_who_was_behind_is_told_so_and_by_how_much() -> None:
    got = report(status="behind", behind_ops=70, links=())
    assert (got.status, got.behind_ops, got.lost_frac, got.contributed) == ("behind", 70, 1.0, False)
    assert got.ended_by == "deadline"


@pytest.mark.parametrize("status", ["length_mismatch", "closed", "failed", "seq_exhausted"])
def test_what_is_no_result_is_an_error(status: str) -> None:
    outcome = outcome_of(native(status=status, stated_lengths=[300, 200, None]), GridLayout(3), rank=1)
    assert isinstance(outcome, TailcutError)
    assert ("(rank 0: 300, rank 1: 200)" in str(outcome)) == (status == "length_mismatch")


def test_a_judged_report_differs_in_its_verdicts_only() -> None:
    before = report()
    verdicts = (Verdict.ON_TIME, Verdict.COMPUTE_LATE, Verdict.SILENT)
    after = before.judged(verdicts)
    assert after.verdicts == verdicts
    assert before.verdicts == ()
    assert after.judged(()) == before
    assert [str(verdict) for verdict in verdicts] == ["on time", "compute-late", "silent"]


def test_a_report_is_json_with_every_field_and_what_follows_from_them() -> None:
    whole = report(column=[native()], lr_scale=LrScale(0.9, 3)).judged((Verdict.SILENT,) * 3)
    found = whole.to_dict()
    assert found.keys() >= {*Report.__dataclass_fields__, "ended_by", "missing_from"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["links"][2]["gather"] == {"coords": 100, "missing": 10, "empty": 0, "last_s": 0.19}
    assert found["verdicts"] == ["silent"] * 3
    assert found["column"][0]["seq"] == 5


def test_a_key_that_json_does_not_have_is_a_string() -> None:
    assert plain(frozenset([1])) == "frozenset({1})"
    assert plain(("a", 1)) == ["a", 1]
    assert plain({1: Epsilon(lost=0.5)})["1"]["lost"] == 0.5


# ---- the native structs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRUCTS)
def test_a_class_that_lacks_a_field_of_its_struct_is_refused(name: str) -> None:
    class Other(NamedTuple):
        seq: int

    with pytest.raises(TypeError, match="Other does not have the native fields"):
        _native.mirror_reports(**{**STRUCTS, name: Other})
    _native.mirror_reports(**STRUCTS)


def test_every_native_struct_comes_as_its_class() -> None:
    lossy = Scenario(ranks=3, length=5000, ops=4, loss=0.2, resend=False, deadline_s=0.05)
    (*_, last) = (native for native in simulate(lossy).native.reports[1])
    assert type(last.traffic) is Traffic
    assert type(last.scatter) is type(last.gather) is StageReport
    assert type(last.lr_scale) is LrScale
    for link in last.links:
        assert type(link) is Link
        assert type(link.scatter) is type(link.gather) is LinkStage
        assert hash(link) == hash(Link(*link))  # as a tuple that Python has made
    assert last.scatter.missing == sum(link.scatter.missing for link in last.links) > 0
    assert last.gather.missing == sum(link.gather.missing for link in last.links)
    assert last.gather.coords == sum(link.gather.coords for link in last.links) == 5000
    assert sum(link.received_packets for link in last.links) > 0


def test_without_its_classes_a_report_says_what_to_import() -> None:
    script = """
from tailcut import _native
spec = _native.SimSpec()
spec.terms = _native.Terms(_native.Bounds(*[10**8] * 6), 16)
spec.ops_by_rank, spec.compute_ns = [1], [[0]]
import numpy as np
report = _native.simulate(spec, [[np.zeros(8, np.float32)]]).reports[0][0]
try:
    report.links
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "tailcut.mirror: import it" in done.stdout


def test_times_are_of_the_ops_own_clock() -> None:
    simulation = simulate(Scenario(ranks=4, length=4096, compute_s=[[0.0, 0.01, 0.02, 0.03]]))
    (native,) = simulation.native.reports[1]
    entered = [link.entered_s for link in native.links]
    assert entered[1] == 0
    assert entered[0] == pytest.approx(-0.01, abs=1e-3)
    assert entered[3] == pytest.approx(0.02, abs=1e-3)
    assert native.scatter.began_s == 0  # it was the second of four to enter
    assert native.closed_at == native.entered_at + round(1e9 * native.scatter.ended_s)
    assert native.gather.ended_s == (native.ended_at - native.entered_at) / 1e9
    assert native.links[1].scatter.last_s is None


def test_counts_add_up_by_name() -> None:
    assert summed(Traffic(sent_bytes=1), Traffic(sent_bytes=2, late_packets=3)) == Traffic(
        0, 3, late_packets=3
    )
    assert summed({"a": 1}, {"a": 2, "b": 3}) == {"a": 3, "b": 3}


def test_all_that_reports_are_made_of_says_what_it_is() -> None:
    for cls in STRUCTS.values():
        assert cls.__doc__
        assert cls.__module__ == mirror.__name__


# ---- tables ------------------------------------------------------------------------------------------------


def test_summaries_have_the_figures_of_reports_by_name() -> None:
    scenario = Scenario(ranks=4, length=5000, ops=3, loss=0.2, resend=False, deadline_s=0.05, elided=True)
    reports = simulate(scenario).native.reports
    spec = spec_of(scenario)
    spec.summaries = True
    table = _native.simulate(spec, elided_buckets(scenario)).summaries()
    assert len(table) == 12
    for row in table:
        report = reports[row["rank"]][row["op"]]
        assert (row["entered_at_ns"], row["closed_at_ns"]) == (report.entered_at, report.closed_at)
        assert row["ended_at_ns"] == report.ended_at
        assert (row["scatter_coords"], row["scatter_missing"]) == report.scatter[4:6]
        assert (row["gather_missing"], row["gather_empty"]) == report.gather[5:7]
        assert row["late_coords"] == report.late_coords
        for name in ("sent_packets", "sent_bytes", "received_packets", "trimmed_packets"):
            assert row[name] == getattr(report.traffic, name)
    assert table["gather_missing"].sum() > 0


@pytest.mark.parametrize("name", ["summaries", "deliveries", "ops", "carry"])
def test_the_columns_of_a_table_do_not_overlap(name: str) -> None:
    tables: dict[str, Callable[[], Any]] = {
        "summaries": lambda: simulate(Scenario(ranks=2)).native.summaries(),
        "deliveries": lambda: simulate(Scenario(ranks=2, record=True)).native.deliveries(),
        "ops": lambda: simulate_baseline(Baseline(algorithm="ring", ranks=2, bucket_bytes=100)).ops(),
        "carry": lambda: _native.carry(_native.NetworkSpec(), 2, [(0, 0, [1], 100)]),
    }
    dtype = tables[name]().dtype
    end = 0
    for field, offset in dtype.fields.values():
        assert offset >= end
        assert offset % field.itemsize == 0
        end = offset + field.itemsize
    assert end <= dtype.itemsize
    assert all(np.issubdtype(field, np.integer) or field == np.bool_ for field, _ in dtype.fields.values())
