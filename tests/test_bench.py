"""tailcut.tools.bench: real workers on small buckets, and the figures made of their samples."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from tailcut import Config, ConfigError, PeerError, Report
from tailcut.tools.bench.allreduce import NoProgress, Options, Row, run, run_plan
from tailcut.tools.bench.figures import Figures, Round, WrongResultError, judge, ratio
from tailcut.tools.bench.sides import TailcutSide, delivered_frac
from tailcut.tools.bench.table import header, line
from tailcut.tools.bench.worker import WARMUP, Plan, Sample, Samples, Source
from tailcut.tools.workers import Workers
from tests.reports import links


class SpoiledSide(TailcutSide):
    """Says that all is well and is off by one unit in the last place, on one rank, in one coordinate."""

    def __init__(self, rank: int, ranks: int, directory: Path, config: Config) -> None:
        super().__init__(rank, ranks, directory, config)
        self._rank = rank

    def allreduce(self, array: np.ndarray) -> Report:
        report = super().allreduce(array)
        if self._rank == 1:
            array[-1] = np.nextafter(array[-1], np.float32(np.inf))
        return report


class DyingSide(TailcutSide):
    def allreduce(self, array: np.ndarray) -> Report:
        if self._group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().allreduce(array)


class RaisingSide(TailcutSide):
    def allreduce(self, array: np.ndarray) -> Report:
        if self._group.rank == 1:
            raise ZeroDivisionError("in the worker")
        return super().allreduce(array)


class LateSide(TailcutSide):
    """Rank 1 never takes part, so that every op of the others loses its share."""

    def allreduce(self, array: np.ndarray) -> Report:
        if self._group.rank == 1:
            return Report(seq=0, status="behind", length=array.size, elapsed_s=0.0)
        return super().allreduce(array)


def plan(directory: Path, side: type[TailcutSide], **changes) -> Plan:
    settings = {
        "ranks": 2,
        "counts": (1000,),
        "iters": (2,),
        "warmup": 1,
        "rounds": 1,
        "sides": {"tailcut": side},
        "config": Config(),
        "directory": directory,
    }
    return Plan(**{**settings, **changes})


def samples(*ops: Sample, side: str = "tailcut") -> Samples:
    return Samples(count_index=0, round_index=0, side=side, ops=ops)


GOOD = Sample(elapsed_s=1.0, delivered=1.0, nmse=0.0, correct=True)
WRONG = Sample(elapsed_s=1.0, delivered=1.0, nmse=0.1, correct=False)
LOSSY = Sample(elapsed_s=2.0, delivered=0.5, nmse=0.5, correct=False)


def test_every_size_gives_a_row_with_exact_results():
    rows = list(run(Options(ranks=(3,), sizes_bytes=(4, 1024, 100_000), iters=3, warmup=1, rounds=2)))
    assert [row.size_bytes for row in rows] == [4, 1024, 100_000]
    for row in rows:
        figures = row.sides["tailcut"]
        assert (figures.delivered, figures.nmse) == (1.0, 0.0)
        assert [len(r.slowest_s) for r in figures.rounds] == [3, 3]


def test_several_numbers_of_ranks_follow_each_other():
    rows = list(run(Options(ranks=(1, 2), sizes_bytes=(64,), iters=1, rounds=1)))
    assert [row.ranks for row in rows] == [1, 2]


def test_gloo_is_measured_in_the_same_run_and_compared_by_round():
    options = Options(ranks=(2,), sizes_bytes=(4096,), iters=2, warmup=1, rounds=5, sides=("tailcut", "gloo"))
    (row,) = run(options)
    own, gloo = row.sides["tailcut"], row.sides["gloo"]
    assert len(own.rounds) == len(gloo.rounds) == 5
    assert gloo.nmse < 1e-12
    assert len(ratio(gloo, own, 50).by_round) == 5
    assert "gloo/tailcut p99" in header(options)
    assert line(row).split()[:2] == ["4096", "1024"]


def test_sides_change_places_every_round(tmp_path):
    steps = plan(tmp_path, TailcutSide, rounds=3, sides={"a": TailcutSide, "b": TailcutSide}).schedule()
    assert [name for _, round_index, name in steps if round_index != WARMUP] == ["a", "b", "b", "a", "a", "b"]


def test_one_wrong_bit_on_one_rank_is_a_failure(tmp_path):
    with pytest.raises(WrongResultError, match=r"tailcut returned a wrong result.*ranks \[1\] differ"):
        list(run_plan(plan(tmp_path, SpoiledSide), NoProgress()))


def test_the_warm_up_is_checked_too(tmp_path):
    with pytest.raises(WrongResultError, match="round -1"):
        list(run_plan(plan(tmp_path, SpoiledSide, warmup=2), NoProgress()))


def test_loss_is_reported_not_a_failure(tmp_path):
    lossy = plan(tmp_path, LateSide, ranks=3, config=Config(deadline_s=0.05))
    (row,) = run_plan(lossy, NoProgress())
    figures = row.sides["tailcut"]
    assert figures.delivered < 1.0
    assert figures.nmse > 0.0


def test_a_killed_worker_is_named_and_takes_the_others_along(tmp_path):
    with pytest.raises(PeerError, match="rank 1 was killed by SIGKILL"):
        list(run_plan(plan(tmp_path, DyingSide), NoProgress()))


def test_a_worker_that_raises_is_shown_with_its_traceback(tmp_path):
    with pytest.raises(PeerError, match=r"(?s)rank 1 failed.*ZeroDivisionError: in the worker"):
        list(run_plan(plan(tmp_path, RaisingSide), NoProgress()))


def _send_and_stop(rank, send):
    send(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def test_leaving_kills_stopped_workers():
    with Workers(2, _send_and_stop, ()) as workers:
        messages = workers.messages()
        next(messages), next(messages)
    for pid in workers.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_missing_torch_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "tailcut.pytorch.gloo", raising=False)
    with pytest.raises(ConfigError, match=r"pip install tailcut\[bench\]"):
        import tailcut.pytorch.gloo  # noqa: F401


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"ranks": (0,)}, "ranks=0"),
        ({"sizes_bytes": (6,)}, "size 6"),
        ({"iters": 0}, "iters=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"rounds": 4, "sides": ("tailcut", "gloo")}, "rounds=4"),
    ],
)
def test_options_are_checked_before_anything_starts(changes, culprit):
    with pytest.raises(ConfigError, match=culprit):
        Options(**changes)


def test_the_slowest_rank_makes_the_time():
    fast, slow = GOOD, Sample(elapsed_s=3.0, delivered=1.0, nmse=0.0, correct=True)
    assert judge([samples(fast, slow), samples(slow, fast)], 1).slowest_s == (3.0, 3.0)


def test_a_wrong_result_counts_only_if_everything_was_delivered_everywhere():
    with pytest.raises(WrongResultError):
        judge([samples(GOOD), samples(WRONG)], 1)
    assert judge([samples(LOSSY), samples(WRONG)], 1).nmse == (0.5,)


def test_bandwidths_are_those_of_nccl_tests():
    figures = Figures(ranks=4, count=250, rounds=(Round((0.5, 0.5), (1.0, 1.0), (0.0, 0.0)),))
    assert figures.algbw == 2000
    assert figures.busbw == 2000 * 2 * 3 / 4


def test_ratio_has_its_spread_over_rounds():
    def figures(*times_s):
        return Figures(2, 1, tuple(Round((t,), (1.0,), (0.0,)) for t in times_s))

    value = ratio(figures(2.0, 6.0, 4.0), figures(1.0, 1.0, 1.0), 50)
    assert (value.median, value.spread) == (4.0, (2.0, 6.0))


def test_every_op_has_its_own_input_and_answer():
    sources = [Source(rank, 3, 100) for rank in range(3)]
    buckets = [np.empty(100, np.float32) for _ in sources]
    answers: list[np.ndarray] = []
    for _ in range(2):
        answers = [*answers, *(source.fill(bucket) for source, bucket in zip(sources, buckets, strict=True))]
        mean = (buckets[0] + buckets[1] + buckets[2]) / np.float32(3)
        assert np.array_equal(mean, answers[-1])
    assert not np.array_equal(answers[0], answers[-1])


def test_delivered_counts_what_the_peers_owed():
    report = Report(
        seq=0,
        status="partial",
        length=100,
        elapsed_s=1.0,
        links=links(scatter_lost=(0.0, 1.0), gather_lost=(0.0, 0.5)),
    )
    assert delivered_frac(report, rank=0) == 0.25
    assert delivered_frac(None, rank=0) == 1.0


def test_a_row_without_comparison_shows_the_columns_of_nccl_tests():
    figures = Figures(4, 256, (Round((0.001,), (1.0,), (0.0,)),))
    row = Row(4, 1024, {"tailcut": figures})
    assert line(row).split() == ["1024", "256", "1000.0", "1000.0", "0.001", "0.002", "100", "0"]
    titles = header(Options()).splitlines()[0].split()
    assert titles == ["size", "count", "p50", "p99", "algbw", "busbw", "delivered", "NMSE"]
