"""Reports: what the native side says, in seconds after the rank's own entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tailcut import Report, _native
from tailcut.grid import GridLayout
from tailcut.report import LateCompletion, Verdict, outcome_of

MS = 1_000_000


def native(**fields: Any) -> Any:
    """The report of rank 1 of 3 on an op that it entered at 1 s, whose shard it had closed before."""
    values = {
        "status": _native.Status.DEADLINE,
        "seq": 5,
        "place": 1,
        "column": [],
        "behind_ops": 0,
        "bucket_len": 300,
        "non_finite": False,
        "contributed": True,
        "planes": 0,
        "entered_at": 1000 * MS,
        "majority_entered_at": 900 * MS,
        "scatter_closed_at": 950 * MS,
        "finished_at": 1200 * MS,
        "scatter_ended_by": SimpleNamespace(name="BOUND"),
        "gather_ended_by": SimpleNamespace(name="GRACE"),
        "shard_lengths": [100, 100, 100],
        "energies": _native.Energies(),
        "lr_scale": 0.0,
        "lr_period": 0,
        "scatter_missing": [0, 100, 50],
        "abstained": [],
        "gather_missing": [0, 0, 10],
        "gather_empty": [0, 0, 0],
        "peer_entered_at": [900 * MS, 1000 * MS, -1],
        "scatter_last_at": [940 * MS, -1, -1],
        "gather_last_at": [1100 * MS, -1, 1190 * MS],
        "silent": [False, False, True],
        "sent_to_packets": [10, 0, 20],
        "sent_lost_packets": [1, 0, 0],
        "received_from_packets": [0, 3, 5],
        "received_lost_packets": [0, 1, 0],
        "late": [SimpleNamespace(seq=3, stage=1, bucket_len=80, took_ns=40 * MS)],
    }
    counts = (
        "sent_bytes",
        "received_bytes",
        "gather_planes",
        "sent_packets",
        "received_packets",
        "trimmed_packets",
        "resent_packets",
        "multicast_packets",
    )
    return SimpleNamespace(**{**values, **dict.fromkeys(counts, 7), **fields})


def report(**fields: Any) -> Report:
    outcome = outcome_of(native(**fields), GridLayout(3), rank=1)
    assert isinstance(outcome, Report)
    return outcome


def test_times_are_seconds_after_the_own_entry_and_none_where_unknown() -> None:
    got = report()
    assert got.entered_s == (-0.1, 0.0, None)
    assert got.scatter_last_s == (-0.06, None, None)
    assert got.gather_last_s == (0.1, None, 0.19)
    assert got.majority_entered_s == pytest.approx(-0.1)


def test_stages_are_timed_from_their_own_starts() -> None:
    got = report()
    assert got.scatter_took_s == pytest.approx(0.05)
    assert got.gather_took_s == pytest.approx(0.2)
    assert report(scatter_closed_at=1050 * MS).gather_took_s == pytest.approx(0.15)
    assert report(majority_entered_at=-1).scatter_took_s is None


def test_endings_silent_ranks_losses_and_late_completions_are_told() -> None:
    got = report()
    assert (got.scatter_ended_by, got.gather_ended_by) == ("bound", "grace")
    assert got.silent == (2,)
    assert got.sent_lost == (0.1, 0.0, 0.0)
    assert got.received_lost == (0.0, 0.25, 0.0)
    assert got.late == (LateCompletion(3, "gather", 80, 0.04),)
    assert got.resent_packets == 7


def test_a_judged_report_differs_in_its_verdicts_only() -> None:
    before = report()
    verdicts = (Verdict.ON_TIME, Verdict.COMPUTE_LATE, Verdict.SILENT)
    after = before.judged(verdicts)
    assert after.verdicts == verdicts
    assert before.verdicts == ()
    assert after.judged(()) == before
    assert [str(verdict) for verdict in verdicts] == ["on time", "compute-late", "silent"]
