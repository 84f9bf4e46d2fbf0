"""Slow ports as one rank sees them (docs/epochs.md), and how much each rank should own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tailcut import Report
from tailcut.mirror import Link, LinkStage, StageReport
from tailcut.policy.ports import (
    HEALED,
    HEAVIEST,
    LEAST,
    MOST_SIZES,
    OPS,
    SLOW,
    Ports,
    owner_weights,
    wanted_speeds,
)

LENGTH = 8000


def report_of(
    took_s: Sequence[float],
    in_flight_s: Sequence[float] | None = None,
    entered_s: Sequence[float] | None = None,
    weights: Sequence[int] | None = None,
    came: float = 1.0,
) -> Report:
    """An op at rank 0: by rank, how long its contribution took, and how long the path to it was busy."""
    ranks = len(took_s)
    coords = [LENGTH * w // sum(weights) for w in weights] if weights else [LENGTH // ranks] * ranks
    own, entered_s = coords[0], entered_s or [0.0] * ranks
    links = tuple(
        Link(
            entered_s[rank],
            scatter=LinkStage(own, round((1 - came) * own), last_s=entered_s[rank] + took_s[rank]),
            gather=LinkStage(coords[rank]),
            delivered_bytes=own + coords[rank],
            in_flight_s=(in_flight_s or took_s)[rank],
        )
        for rank in range(ranks)
    )
    ended_s = max(took_s)
    stage = StageReport(began_s=0.0, ended_s=ended_s)
    return Report(0, "complete", LENGTH, 2 * ended_s, scatter=stage, links=links)


def seen(*reports: Report) -> dict[int, float]:
    ports = Ports(len(reports[0].links), 0)
    for k in range(OPS):
        assert ports.after(reports[k % len(reports)]) == (k == OPS - 1)
    return dict(ports.speeds)


# ---- what is a slow port -----------------------------------------------------------------------------------


def test_a_port_is_compared_with_the_median_of_the_others() -> None:
    assert seen(report_of([1, 1, 1, 2])) == {1: 1.0, 2: 1.0, 3: 0.5}


def test_both_directions_must_show_it() -> None:
    alike = [1.0, 1.0, 1.0, 1.0]
    assert seen(report_of([1, 1, 1, 4], alike))[3] == 1.0
    assert seen(report_of(alike, [1, 1, 1, 4]))[3] == 1.0
    assert seen(report_of([1, 1, 1, 4], [1, 1, 1, 2]))[3] == 0.5


def test_nothing_is_known_of_few_ops() -> None:
    ports = Ports(4, 0)
    for _ in range(OPS - 1):
        ports.after(report_of([1, 1, 1, 2]))
    assert ports.speeds == {}


def test_what_slows_all_paths_is_no_ranks_port() -> None:
    """This rank is busy, or its own port is slow."""
    assert set(seen(report_of([1, 3, 3, 3])).values()) == {1.0}


def test_bursts_count_only_if_they_are_in_half_of_the_ops() -> None:
    usual, burst = report_of([1, 1, 1, 1]), report_of([1, 1, 1, 9])
    assert seen(usual, usual, burst, usual, burst)[3] == 1.0
    assert seen(usual, burst, burst)[3] < SLOW


def test_long_ops_say_more_than_short_ones() -> None:
    short = replace(report_of([1, 1, 1, 1]), length=LENGTH // 10)
    assert seen(short, short, short, report_of([1, 1, 1, 2]))[3] == 0.5


def test_jitter_is_no_slow_port() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        times = 1 + 0.1 * rng.standard_normal((OPS, 8))
        assert min(seen(*(report_of(row.tolist()) for row in times)).values()) > HEALED


def test_a_rank_that_enters_late_says_nothing_of_its_port() -> None:
    """What it sends meets the means of the others. The path to it tells enough."""
    for entered_s, speed in ((0.5, 0.5), (1.0, 0.25)):
        report = report_of([1, 1, 1, 2], [1, 1, 1, 4], entered_s=[0, 0, 0, entered_s])
        assert seen(report)[3] == speed


def test_a_contribution_that_was_cut_counts_with_what_it_would_have_taken() -> None:
    links = list(report_of([1, 1, 1, 1], [1, 1, 1, 4]).links)
    links[3] = links[3]._replace(scatter=links[3].scatter._replace(missing=links[3].scatter.coords // 2))
    stage = StageReport(began_s=0.0, ended_s=1.0)
    assert seen(Report(0, "partial", LENGTH, 2.0, scatter=stage, links=tuple(links)))[3] == 0.5


@pytest.mark.parametrize("blind_to", [{"delivered_bytes": 0}, {"entered_s": None}])
def test_with_other_shares_a_rank_is_judged_by_what_it_moves(blind_to: dict[str, Any]) -> None:
    """Rank 3 owns little, so it sends more contributions than the others and is sent less. Each way alone
    tells its speed."""
    weights = [HEAVIEST] * 3 + [LEAST]
    share = [w / sum(weights) for w in weights]
    for speed in (1.0, 0.5):
        speeds = [1.0, 1.0, 1.0, speed]
        sent_s = [(1 - w) / s for w, s in zip(share, speeds, strict=True)]
        came_s = [(1 + 2 * w) / s for w, s in zip(share, speeds, strict=True)]
        report = report_of(sent_s, came_s, weights=weights)
        links = tuple(link._replace(**blind_to) for link in report.links)
        assert seen(replace(report, links=links))[3] == pytest.approx(speed, abs=0.02)


def test_a_change_is_judged_by_the_ops_of_one_size() -> None:
    ports = Ports(4, 0)
    for _ in range(OPS):
        ports.after(report_of([1, 1, 1, 2]))
    assert ports.gain == math.inf  # owners have not changed yet
    ports.forget()
    for _ in range(OPS):
        ports.after(report_of([1, 1, 1, 1.6]))
    assert ports.gain == pytest.approx(2 / 1.6)
    ports.forget()
    for _ in range(OPS):
        ports.after(replace(report_of([1, 1, 1, 1.6]), length=2 * LENGTH))
    assert ports.gain == math.inf


# ---- what is to be changed ---------------------------------------------------------------------------------


def test_thresholds() -> None:
    alike = [1.0] * 4
    assert wanted_speeds({3: SLOW}, alike) == {}
    assert wanted_speeds({3: SLOW - 0.01}, alike) == {3: SLOW - 0.01}
    slow = [1.0, 1.0, 1.0, 0.6]
    assert wanted_speeds({3: HEALED}, slow) == {}
    assert wanted_speeds({3: HEALED + 0.01}, slow) == {3: 1.0}


def test_a_slow_port_that_changes_is_no_news_if_its_rank_owns_as_little_as_before() -> None:
    assert wanted_speeds({3: 0.25}, [1.0, 1.0, 1.0, 0.5]) == {}
    assert wanted_speeds({3: 0.5}, [1.0, 1.0, 1.0, 0.74]) == {3: 0.5}


# ---- who owns how much -------------------------------------------------------------------------------------


def times_of(speeds: Sequence[float], weights: Sequence[int]) -> list[float]:
    """How long each port needs, in units of a bucket at full rate."""
    n, total = sum(s > 0 for s in speeds), sum(weights)
    return [(1 + w / total * (n - 2)) / s for s, w in zip(speeds, weights, strict=True) if s > 0]


def test_equal_ports_own_alike() -> None:
    assert owner_weights([1.0] * 4) == (1, 1, 1, 1)
    assert owner_weights([0.5, 0, 0.5, 0.5]) == (1, 0, 1, 1)
    assert owner_weights([1.0, 0.5]) == (1, 1)  # a share of two changes nothing
    assert owner_weights([0.0, 0.0]) == (0, 0)


@pytest.mark.parametrize("ranks", [3, 4, 8, 64])
@pytest.mark.parametrize("speed", [0.9, 0.75, 0.67, 0.5, 0.25, 0.05])
def test_shares_make_ops_as_short_as_they_can_be(ranks: int, speed: float) -> None:
    speeds = [1.0] * (ranks - 1) + [speed]
    weights = owner_weights(speeds)
    best = max(times_of(speeds, weights))
    assert best <= max(times_of(speeds, [1] * ranks)) + 1e-9
    least = LEAST / (HEAVIEST * (ranks - 1) + LEAST)
    for weight in range(HEAVIEST + 1):
        other = max(times_of(speeds, [HEAVIEST] * (ranks - 1) + [weight]))
        assert best <= other * (1 + (ranks - 2) * least + 0.005)


def test_several_ports_may_be_slow_each_in_its_way() -> None:
    weights = owner_weights([1, 0.8, 0.6, 1, 1, 0.3, 0, 1])
    assert weights[0] == weights[3] == HEAVIEST > weights[1] > weights[2] >= weights[5] == LEAST
    assert weights[6] == 0


def test_times_are_kept_of_the_latest_sizes_only() -> None:
    """Ops without a key may have any number of lengths."""
    ports = Ports(4, 0)
    for length in range(1, 2 * MOST_SIZES):
        ports.after(replace(report_of([1, 1, 1, 1]), length=length))
    assert len(ports._took_s) == MOST_SIZES
