"""How fast the other ranks' ports are, as one rank sees them, and how much each rank should own.

A rank is compared with the median of the others in the same op, so that what slows all of them down, or this
rank itself, is no rank's port. Knows nothing of votes: epochs.py agrees on what is seen here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median

from tailcut.mirror import Link
from tailcut.report import Report

OPS = 128
"""A port is judged by its median over so many ops, the longer ones weighing more: bursts of other traffic
block a port for a few ops in a row, and must be in half of all before they count."""

REVIEW_OPS = 32
"""It is judged this often."""

SLOW, HEALED = 0.75, 0.9
"""A port is slow below this share of the others' rate, and as fast as they above that."""

LATE_SHARE = 0.25
"""A rank that entered later than half of the others, by this share of SCATTER's time, says nothing of its
port: its packets meet others than theirs."""

MOST_SIZES = 256
"""Sizes of ops whose times are kept. Buckets recur in a few; without keys there may be any number."""

HEAVIEST = 64
"""The weight of the rank that owns most."""

WORTH = 8
"""Owners change for a port that was slow before if its weight changes by so much."""

LEAST = 4
"""The least weight of a slow port. What its rank owns tells it who is there, and others how fast it is."""


class Ports:
    """The ports of the others. ``rank`` is the one that looks."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._rank = rank
        self._ranks = ranks
        self._took_s: dict[int, deque[float]] = {}  # by size: the latest ops
        self._before_s: dict[int, float] = {}  # by size: the median when owners changed last
        self.forget()

    def forget(self) -> None:
        """Owners have changed: begin anew."""
        self._seen = [(_Ratios(), _Ratios()) for _ in range(self._ranks)]  # from the rank, and to it
        self._ops = 0
        self._before_s = self._medians_s
        self._took_s = {}
        self.speeds: Mapping[int, float] = {}
        """By rank: the rate of its port, relative to the others', as far as it is known."""

    def after(self, report: Report) -> bool:
        """An op has ended. Returns whether ports have been judged anew."""
        self._took_s.setdefault(report.size, deque(maxlen=OPS)).append(report.elapsed_s)
        if len(self._took_s) > MOST_SIZES:
            del self._took_s[next(iter(self._took_s))]
        others = {
            rank: link
            for rank, link in zip(report.members, report.links, strict=True)
            if rank != self._rank and not (link.silent or link.abstained or link.left)
        }
        from_s = {rank: _from_s(link, report) for rank, link in others.items()}
        to_s = {rank: _to_s(link, report) for rank, link in others.items() if link.delivered_bytes}
        self._compare({rank: time_s for rank, time_s in from_s.items() if time_s is not None}, 0, report.size)
        self._compare(to_s, 1, report.size)
        self._ops += 1
        if self._ops < OPS or self._ops % REVIEW_OPS:
            return False
        medians = {rank: [r.median for r in seen if r.full] for rank, seen in enumerate(self._seen)}
        # A port that is slow only one way shows in both: the other direction waits for it.
        self.speeds = {rank: min(1.0, max(ratios)) for rank, ratios in medians.items() if ratios}
        return True

    def _compare(self, times_s: Mapping[int, float], direction: int, size: int) -> None:
        """``times_s``: by rank, how long its port needs, up to a factor that all have in common."""
        if len(times_s) < 2:
            return
        usual_s = sorted(times_s.values())[(len(times_s) - 1) // 2]
        for rank, time_s in times_s.items():
            self._seen[rank][direction].add(usual_s / time_s if time_s > 0 else 1.0, size)

    @property
    def _medians_s(self) -> dict[int, float]:
        return {size: median(times_s) for size, times_s in self._took_s.items() if len(times_s) >= REVIEW_OPS}

    @property
    def gain(self) -> float:
        """How many times faster ops are than before owners changed; infinite if none of them can be
        compared."""
        now_s = self._medians_s
        sizes = now_s.keys() & self._before_s.keys()
        before_s = sum(self._before_s[size] for size in sizes)
        return before_s / sum(now_s[size] for size in sizes) if sizes else math.inf


class _Ratios:
    """The latest ratios of a rank's rate to the median one, in one direction."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, int]] = deque(maxlen=OPS)

    def add(self, ratio: float, size: int) -> None:
        self._latest.append((ratio, size))

    @property
    def full(self) -> bool:
        return len(self._latest) >= OPS // 2

    @property
    def median(self) -> float:
        """Weighted by size."""
        ordered = sorted(self._latest)
        sums = list(accumulate(size for _, size in ordered))
        return ordered[bisect_left(sums, sums[-1] / 2)][0]


def _from_s(link: Link, report: Report) -> float | None:
    """How long the rank's contribution took, or would have taken, per what it sends to all; None: that is not
    known."""
    scatter, stage = link.scatter, report.scatter
    end_s = stage.ended_s if scatter.missing else scatter.last_s
    came = scatter.coords - scatter.missing
    sent = report.length - link.gather.coords
    if link.entered_s is None or end_s is None or stage.began_s is None or not (came and sent):
        return None
    if link.entered_s - stage.began_s > LATE_SHARE * (stage.took_s or 0.0):
        return None
    return max(0.0, end_s - link.entered_s) * scatter.coords / came * report.length / sent


def _to_s(link: Link, report: Report) -> float:
    """How long the path to the rank was busy for a byte, times the share of this path in what comes to it."""
    own, its = link.scatter.coords, link.gather.coords
    return (
        link.in_flight_s
        / link.delivered_bytes
        * (own + its)
        / (report.length + its * (len(report.links) - 2))
    )


def wanted_speeds(seen: Mapping[int, float], agreed: Sequence[float]) -> dict[int, float]:
    """By rank: the speeds that differ so much from what was agreed on that owners should change."""
    wanted = {}
    for rank, speed in seen.items():
        new = 1.0 if speed > HEALED else round(speed, 2) if speed < SLOW else agreed[rank]
        if (new == 1.0) != (agreed[rank] == 1.0) or _weight_changes(rank, new, agreed):
            wanted[rank] = new
    return wanted


def _weight_changes(rank: int, speed: float, agreed: Sequence[float]) -> bool:
    speeds = [speed if other == rank else old for other, old in enumerate(agreed)]
    return speed != agreed[rank] and abs(owner_weights(speeds)[rank] - owner_weights(agreed)[rank]) >= WORTH


def owner_weights(speeds: Sequence[float]) -> tuple[int, ...]:
    """By rank: the weights with which all ports need the same time for an op; a speed of 0 is that of a rank
    that owns nothing.

    A rank with a share w of a bucket moves 1 + w(n - 2) buckets each way. So a port of speed f needs the time
    T if 1 + w(n - 2) = T f. A port that needs longer even without a share has the least weight.
    """
    owners = sorted((speed for speed in speeds if speed > 0), reverse=True)
    if len(owners) < 3 or owners[0] == owners[-1]:
        return tuple(int(speed > 0) for speed in speeds)
    # T if only so many of the fastest have shares. The next one makes it shorter if it can be on time too.
    time = min((len(owners) - 2 + count) / sum(owners[:count]) for count in range(1, len(owners) + 1))
    heaviest = time * owners[0] - 1
    shares = [max(0.0, time * speed - 1) / heaviest for speed in speeds]
    return tuple(
        max(LEAST, round(HEAVIEST * share)) if speed > 0 else 0
        for share, speed in zip(shares, speeds, strict=True)
    )
