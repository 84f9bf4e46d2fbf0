"""tailcut.demo: the script played with small vectors, and its figures."""

from __future__ import annotations

import io
import os
import signal

import pytest

from tailcut import ConfigError, PeerError, Report, demo
from tailcut.demo.director import Director, Story
from tailcut.demo.display import Screen
from tailcut.demo.summary import render, summarize
from tailcut.demo.worker import Board, Op, Script, work
from tailcut.workers import Workers

SHORT = Script(ranks=3, frozen_rank=1, count=1000, deadline_s=0.05, before_s=0.1, freeze_s=0.3, after_s=0.1)


class Killer:
    """A display that kills a worker as soon as all are running."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def show(self, entries, states) -> None:
        if all(state == "running" for state in states):
            os.kill(self._pid, signal.SIGKILL)


def op(seq: int, entered_s: float, ended_s: float, **report) -> Op:
    return Op(entered_s, ended_s, Report(seq=seq, status="complete", length=4, elapsed_s=0.0, **report))


def test_demo_completes_and_says_what_the_freeze_cost():
    stream = io.StringIO()
    story = demo.run(SHORT, stream)
    text = stream.getvalue()
    assert "rank 1: FROZEN" in text
    assert "rank 1: catching up" in text
    assert [f"rank {rank}: running" in text for rank in range(3)] == [True] * 3
    assert "A collective that waits would have stood still" in text

    last = [ops[-1].report.seq for ops in story.ops]
    assert len(set(last)) == 1
    summary = summarize(story)
    assert summary.ops == last[0] + 1
    assert summary.missed_contributions > 0
    assert summary.behind_ops > 0
    assert summary.phases[1].ops > 0


def test_a_worker_killed_on_the_way_is_named_and_no_process_remains(tmp_path):
    board = Board(tmp_path, SHORT.ranks, create=True)
    with Workers(SHORT.ranks, work, (SHORT, tmp_path)) as workers:
        pids = workers.pids
        with pytest.raises(PeerError, match="rank 2 was killed by SIGKILL"):
            Director(SHORT, workers, board, Killer(pids[2])).play()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_frozen_rank_must_exist():
    with pytest.raises(ConfigError, match="frozen_rank=4"):
        Script(ranks=4, frozen_rank=4)


def test_screen_redraws_in_place(tmp_path):
    stream = io.StringIO()
    entries = Board(tmp_path, 1, create=True).entries
    entries[0] = (7, 0.001, 0.25)
    screen = Screen(stream)
    screen.show(entries, ["running"])
    first = stream.getvalue()
    screen.show(entries, ["FROZEN"])
    assert "25.00%" in first
    assert stream.getvalue()[len(first) :].startswith("\x1b[2A")


def test_summary_of_a_known_story():
    script = Script(ranks=2, frozen_rank=1)
    whole = {"scatter_lost": (0.0, 0.0)}
    missed = {"scatter_lost": (0.0, 1.0), "lost_frac": 0.5}
    story = Story(
        script,
        started_at_s=0.0,
        frozen_at_s=1.0,
        released_at_s=3.0,
        ops=[
            [
                op(0, 0.0, 0.5, **whole),
                op(1, 0.6, 1.6, **missed),
                op(2, 1.7, 2.7, **missed),
                op(3, 2.8, 3.8, **whole),
            ],
            [op(0, 0.0, 0.5), op(1, 0.6, 3.1), op(2, 3.2, 3.3), op(3, 3.4, 3.8)],
        ],
    )
    summary = summarize(story)
    assert summary.ops == 4
    assert [phase.ops for phase in summary.phases] == [1, 2, 0, 1]
    assert summary.missed_contributions == 2
    assert summary.lost_results == (1.0, 0.0)
    assert summary.behind_ops == 2
    assert summary.catch_up_s == pytest.approx(0.4)
    assert "found the results it had missed" in render(summary, story)
