"""tailcut.tools.demo.freeze: a short script played on both sides, and the figures of made-up runs."""

from __future__ import annotations

import importlib.util
import io
import os
import signal

import numpy as np
import pytest

from tailcut import ConfigError, PeerError, Report
from tailcut.tools.demo import freeze
from tailcut.tools.demo.display import Log, Screen
from tailcut.tools.demo.freeze import digits
from tailcut.tools.demo.freeze.director import Director, Run, Story
from tailcut.tools.demo.freeze.rows import Glance, Rows
from tailcut.tools.demo.freeze.summary import Phase, cost_of, render
from tailcut.tools.demo.freeze.worker import Board, Replica, Script, Step, work
from tailcut.tools.workers import Workers
from tests.reports import links

SHORT = Script(ranks=3, frozen_rank=1, epochs=2, width=64, deadline_s=0.1, freeze_at_step=20, freeze_s=1.0)


class Killer:
    """A display that kills a worker at once."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def show(self, glance) -> None:
        os.kill(self._pid, signal.SIGKILL)


def report(**figures) -> Report:
    return Report(**{"seq": 0, "status": "complete", "length": 4, "elapsed_s": 0.0, **figures})


def steps(*times_s: tuple[float, float], reports: dict[int, Report] | None = None) -> list[Step]:
    return [
        Step(i, started_s, ended_s, 0.5, (reports[i],) if reports and i in reports else ())
        for i, (started_s, ended_s) in enumerate(times_s)
    ]


@pytest.mark.long
def test_both_sides_train_and_the_summary_says_what_the_freeze_cost():
    stream = io.StringIO()
    story = freeze.run(SHORT, stream)
    for run in (story.tailcut, story.gloo):
        assert [replica.steps[-1].index + 1 for replica in run.replicas] == [SHORT.steps] * 3
        assert all(replica.steps[-1].loss < replica.steps[0].loss for replica in run.replicas)
    ours, theirs = cost_of(story.tailcut, SHORT), cost_of(story.gloo, SHORT)

    assert ours.done_while_frozen > 0
    assert ours.behind_steps > 0
    assert ours.skipped_steps > 0
    assert [len(replica.steps) for replica in story.gloo.replicas] == [SHORT.steps] * 3
    assert ours.partial_steps > 0
    assert ours.means_lost[0] > 0
    assert ours.contributions_lost[1] > 0
    assert ours.drift_after_resync == (0.0, 0.0, 0.0)

    # At most the step in which the others had already heard from the frozen one, and one that it did before
    # it stopped: the clock of the freeze starts when the signal is sent.
    assert theirs.done_while_frozen <= 2
    assert theirs.means_lost == theirs.contributions_lost == theirs.drift == (0.0, 0.0, 0.0)

    text = stream.getvalue()
    for side in ("tailcut", "Gloo"):
        for state in ("starting", "training", "rank 1 FROZEN", "rank 1 released", "done"):
            assert any(line.startswith(side) and line.endswith(state) for line in text.splitlines())
    assert "With Gloo everybody stood still for" in text


def test_a_worker_killed_on_the_way_is_named_and_no_process_remains(tmp_path):
    digits.load().save(tmp_path / "digits.npz")
    board = Board(tmp_path, SHORT.ranks, create=True)
    with Workers(SHORT.ranks, work, ("gloo", SHORT, tmp_path)) as workers:
        pids = workers.pids
        with pytest.raises(PeerError, match="rank 2 was killed by SIGKILL"):
            Director("gloo", SHORT, workers, board, Killer(pids[2])).play()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"frozen_rank": 4}, "frozen_rank=4 must be between 1 and ranks - 1 = 3"),
        ({"frozen_rank": 0}, "rank 0 is the one that the others are compared with"),
        ({"freeze_at_step": 10_000}, "freeze_at_step=10000 must be between 1 and the last step"),
        ({"freeze_s": 30.0}, "freeze_s=30.0 is more than what a window of 4096 ops covers"),
    ],
)
def test_scripts_that_cannot_be_played_are_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        Script(**change)


@pytest.mark.parametrize("missing", ["sklearn", "torch"])
def test_what_is_not_installed_is_named_with_the_remedy(missing, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(digits, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'tailcut\[demo\]'"):
        freeze.run(SHORT, io.StringIO())


def test_digits_are_split_once_and_every_rank_draws_its_own(tmp_path):
    images = digits.load()
    assert (len(images.train_labels), len(images.test_labels)) == (1437, 360)
    assert (images.train_images.min(), images.train_images.max()) == (0.0, 1.0)
    images.save(tmp_path / "digits.npz")
    again = digits.Digits.read(tmp_path / "digits.npz")
    assert all(np.array_equal(a, b) for a, b in zip(vars(images).values(), vars(again).values(), strict=True))

    drawn = [list(digits.batches(rank, ranks=4, batch=16, epochs=2, seed=0)) for rank in range(4)]
    assert [len(of_rank) for of_rank in drawn] == [2 * 22] * 4
    one_epoch = np.concatenate([batch for of_rank in drawn for batch in of_rank[:22]])
    assert len(one_epoch) == len(set(one_epoch)) == 22 * 64


def test_screen_redraws_in_place():
    stream = io.StringIO()
    rows = Rows(Screen(stream))
    rows.show(Glance("tailcut", 7, 100, 1.25, 0.012, "training"))
    first = stream.getvalue()
    rows.show(Glance("tailcut", 8, 100, 1.25, 0.012, "rank 2 FROZEN"))
    assert "7/100   1.2500      12.0 ms   training" in first
    assert stream.getvalue()[len(first) :].startswith("\x1b[2A")


def test_log_has_a_line_per_change():
    stream = io.StringIO()
    rows = Rows(Log(stream))
    for step, state in [
        (0, "starting"),
        (0, "starting"),
        (3, "training"),
        (99, "training"),
        (101, "training"),
    ]:
        rows.show(Glance("gloo", step, 300, 0.5, 0.01, state))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["0/300", "3/300", "101/300"]


# Five steps of warming up, one before the freeze; then rank 1 is frozen from 6 to 8.
WARM = [(i, i + 0.1) for i in range(5)]
SCRIPT = Script(ranks=2, frozen_rank=1)
TAILCUT = Run(
    "tailcut",
    frozen_at_s=6.0,
    released_at_s=8.0,
    replicas=[
        Replica(
            steps(
                *WARM,
                (5.0, 5.5),
                (5.9, 6.9),
                (7.0, 7.9),
                (7.95, 8.5),
                (8.5, 8.7),
                reports={
                    5: report(links=links(2)),
                    6: report(status="partial", lost_frac=0.5, links=links(scatter_lost=(0.0, 1.0))),
                },
            ),
            accuracy=0.75,
            drift=0.0,
            drift_after_resync=0.0,
        ),
        Replica(
            steps(*WARM, (5.0, 5.5), (5.6, 8.1), (8.2, 8.3), (8.4, 8.5), (8.5, 8.7)),
            accuracy=0.5,
            drift=0.03,
            drift_after_resync=0.0,
        ),
    ],
)
GLOO = Run(
    "gloo",
    frozen_at_s=6.0,
    released_at_s=8.0,
    replicas=[
        Replica(steps(*WARM, (5.0, 5.5), (5.6, 8.1), (8.2, 8.3)), 0.75, 0.0, 0.0),
        Replica(steps(*WARM, (5.0, 5.5), (5.6, 8.1), (8.2, 8.3)), 0.75, 0.0, 0.0),
    ],
)


def test_cost_of_a_freeze_with_tailcut():
    cost = cost_of(TAILCUT, SCRIPT)
    assert cost.total_s == pytest.approx(8.7)
    assert (cost.before.steps, cost.frozen.steps, cost.catching_up.steps, cost.after.steps) == (1, 3, 0, 1)
    assert cost.frozen.max_s == pytest.approx(1.0)
    assert cost.done_while_frozen == 2
    assert cost.behind_steps == 2
    assert cost.catch_up_s == pytest.approx(0.4)
    assert cost.skipped_steps == 0
    assert cost.partial_steps == 1
    assert cost.means_lost == (0.25, 0.0)
    assert cost.contributions_lost == (0.0, 0.5)


def test_cost_of_a_freeze_with_gloo():
    cost = cost_of(GLOO, SCRIPT)
    assert (cost.before.steps, cost.frozen.steps, cost.after.steps) == (1, 1, 1)
    assert cost.frozen.max_s == pytest.approx(2.5)
    assert (cost.done_while_frozen, cost.behind_steps, cost.catch_up_s) == (0, 0, 0.0)
    assert cost.catching_up == Phase(0, 0.0, 0.0, 0.0)


def test_summary_says_that_replicas_differ_and_what_mended_it():
    text = render(Story(SCRIPT, TAILCUT, GLOO))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "rank 1 frozen 3 900 1000 1000 1 2500 2500 2500" in rows
    assert "replicas at the end differ equal" in rows
    assert "after attachment.resync() equal" in rows
    assert "mean gradients lost, other ranks 25.00% 0.00%" in rows
    assert "gradients too late, rank 1's 50.00% 0.00%" in rows
    assert "the lowest of all ranks 50.0% 75.0%" in rows
    assert "over its norm, was 0.03 (rank 1)" in text
