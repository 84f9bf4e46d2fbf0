"""The totals of a group: counted from the reports of its ops, read from its lanes and its steering.

The only place that adds reports up. Every native counter is added to the field of Stats that has its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tailcut import _native
from tailcut.mirror import summed
from tailcut.policy.grid import GridSteering
from tailcut.report import Report
from tailcut.stats import Stats

_PROTOCOL_COUNTS = _native.Counters.fields()
_SOCKET_COUNTS = ("blocked_sends", "failed_sends")
_LANE_COUNTS = ("uncorrected_packets", "pool_used_bytes", "memory_bytes")


class Totals:
    """What the ended ops add up to."""

    def __init__(self) -> None:
        self.counted = Stats()

    def add(self, report: Report) -> None:
        totals = self.counted
        totals.ops += 1
        totals.partial_ops += report.status == "partial"
        totals.lossy_ops += report.lost_frac > 0
        totals.short_means += report.scatter.missing > 0
        totals.behind_ops += report.behind_ops
        totals.coordinates += report.length
        totals.lost_coordinates += round(report.lost_frac * report.length)
        totals.late_coordinates += report.late_coords
        totals.late_completions += len(report.late)

    def with_policy(self, steering: GridSteering) -> Stats:
        """A copy that says what the policies know."""
        return replace(
            self.counted,
            bounds=steering.known_bounds,
            verdicts=steering.verdicts,
            standings=steering.standings,
            drop_share=steering.drop_share,
            epsilon=steering.spending.total,
            recent_epsilon=steering.spending.recent,
            budget=steering.spending.budget,
            lr_scale=steering.lr_scale,
        )


def add_lanes(stats: Stats, lanes: Sequence[_native.LaneStats]) -> None:
    """Add what the lanes have counted."""
    for lane in lanes:
        for source, names in (
            (lane.protocol, _PROTOCOL_COUNTS),
            (lane.socket, _SOCKET_COUNTS),
            (lane, _LANE_COUNTS),
        ):
            for name in names:
                setattr(stats, name, summed(getattr(stats, name), getattr(source, name)))
        stats.contributing &= lane.contributing
    stats.rtt_s = tuple(ns / 1e9 for ns in lanes[0].rtt_ns)
