"""What every op of a grid starts with: the bounds of its row and those of its column."""

from __future__ import annotations

from tailcut import _native
from tailcut.grid import Grid
from tailcut.policy.steering import FixedSteering, Steering
from tailcut.report import Report
from tailcut.stats import OpBounds

COLUMN_SHARE = 0.25
"""The deadline of a column's op as a share of the deadline: its bytes are few, and what is left after SCATTER
in the row, half of the deadline, must do for GATHER too."""


class RowSteering(Steering):
    """Cuts SCATTER as a flat group does. GATHER waits for columns, which wait for all rows: a t_B learned in
    quiet ops would make one late row many (in simulation, one burst cost a quarter of the following results).
    """

    def bounds(self, length: int) -> OpBounds:
        return super().bounds(length)._replace(gather_s=self._longest.gather_s)


class ColumnSteering(RowSteering):
    """Waits for all rows but silent ranks': a sum stands for many contributions."""

    def bounds(self, length: int) -> OpBounds:
        return super().bounds(length)._replace(scatter_s=self._longest.scatter_s)


class GridSteering:
    """A ``Steering`` for the row and one for the column, which is a part of the row's GATHER."""

    def __init__(
        self,
        *,
        rank: int,
        grid: Grid,
        deadline_s: float,
        planes: int,
        straggler_share: float = 0.2,
        adaptive: bool = True,
    ) -> None:
        self._grid = grid
        row: type[Steering] = Steering if grid.rows == 1 else RowSteering
        self._row = (row if adaptive else FixedSteering)(
            rank=rank,
            members=grid.row(rank),
            deadline_s=deadline_s,
            planes=planes,
            straggler_share=straggler_share,
        )
        self._column = (
            (ColumnSteering if adaptive else FixedSteering)(
                rank=rank,
                members=grid.column(rank),
                deadline_s=COLUMN_SHARE * deadline_s,
                planes=planes,
                straggler_share=straggler_share,
                whose="the sum that was brought for its row by rank",
            )
            if grid.rows > 1
            else None
        )
        self._rank = rank

    def terms(self, length: int) -> _native.Terms:
        """For the next op of a bucket of this many coordinates."""
        terms = self._row.terms(length)
        if self._column is None:
            return terms
        return terms.with_column(self._column.terms(self._grid.column_length(length)))

    def after(self, report: Report, now_s: float) -> Report:
        """Learn from an op that ended at ``now_s``, in the order of ending; its report with verdicts."""
        if self._column is not None:
            for column in report.column:
                self._column.after(column, now_s)
        return self._row.after(report, now_s)

    @property
    def known_bounds(self) -> dict[int, OpBounds]:
        """By the longest bucket of every size class in use."""
        return self._row.known_bounds

    @property
    def drop_share(self) -> tuple[float, ...]:
        """By rank: in which share of the latest ops its contribution to this rank's shard was not used."""
        return self._grid.spread(self._row.drop_share, self._rank, 0.0)

    @property
    def verdicts(self) -> tuple[dict[str, int], ...]:
        """By rank: how often each verdict was given; nothing for ranks outside the row."""
        return self._grid.spread(self._row.verdicts, self._rank, {})

    def describe(self) -> str:
        """The derived bounds, in words."""
        if self._column is None:
            return self._row.describe()
        return f"{self._grid.rows} rows of {self._grid.row_length} ranks; {self._row.describe()}"

    def take_alarms(self) -> list[str]:
        """What the user should be told now, once."""
        return self._row.take_alarms() + (self._column.take_alarms() if self._column is not None else [])
