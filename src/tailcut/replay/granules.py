"""Sets of granules as runs in order, each the first one and the one after the last."""

from __future__ import annotations

from collections.abc import Iterable

from tailcut.ledger.fates import Runs


def without(runs: Runs, others: Runs) -> Runs:
    """The granules that are in the runs and not in the others. Both are in order."""
    rest: list[tuple[int, int]] = []
    next_other = 0
    for begin, end in runs:
        at = begin
        while next_other < len(others) and others[next_other][1] <= begin:
            next_other += 1
        for first, last in others[next_other:]:
            if first >= end:
                break
            if first > at:
                rest.append((at, first))
            at = max(at, last)
        if at < end:
            rest.append((at, end))
    return tuple(rest)


def overlap(runs: Runs, others: Runs) -> Runs:
    """The granules that are in both. Both are in order."""
    return without(runs, without(runs, others))


def in_order(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same granules, as runs that do not touch."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)
