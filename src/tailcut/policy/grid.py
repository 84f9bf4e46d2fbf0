"""Decides the terms of every op of a rank: the bounds of its row and of its column, and its planes.

Owns what concerns the whole group: planes, the part of the budget that was spent, the factor of the learning
rate.
"""

from __future__ import annotations

from tailcut import _native
from tailcut.errors import BudgetExceeded
from tailcut.grid import GridLayout
from tailcut.policy.budget import LrOffer, Spending
from tailcut.policy.planes import AdaptivePlanes, FixedPlanes, PlanesPolicy
from tailcut.policy.steering import FixedSteering, Steering
from tailcut.report import Report, size_of
from tailcut.stats import ON_TIME_STANDING, OpBounds, Standing

LATE_SHARE = 1 / 4
"""Ops hurry while what is late has cost less in all than the fewest planes leave of the budget, or this share
of it. To hurry more and send more planes instead takes longer."""

COLUMN_SHARE = 0.25
"""The deadline of a column's op, as a share of the deadline. Its bytes are few. What is left after SCATTER in
the row, half of the deadline, must suffice for GATHER too."""


class RowSteering(Steering):
    """Cuts SCATTER as a flat group does. GATHER waits for columns, which wait for all rows. A t_B that was
    learned in quiet ops would make many late rows out of one (in simulation, one burst cost a quarter of the
    following results)."""

    def bounds(self, size: int, *, carried: bool = True) -> OpBounds:
        return super().bounds(size, carried=carried)._replace(gather_s=self._longest.gather_s)


class ColumnSteering(RowSteering):
    """Waits for all rows except those of silent ranks, because a sum stands for many contributions."""

    def bounds(self, size: int, *, carried: bool = True) -> OpBounds:
        return super().bounds(size, carried=carried)._replace(scatter_s=self._longest.scatter_s)


class GridSteering:
    """A ``Steering`` for the row and one for the column, whose op is a part of the row's GATHER."""

    def __init__(
        self,
        *,
        rank: int,
        grid: GridLayout,
        deadline_s: float,
        planes: int = 0,
        budget: float = 0.05,
        over_budget: str = "proceed",
        straggler_share: float = 0.2,
        adaptive: bool = True,
        trimmable: bool = True,
        lanes: int = 1,
        carries: bool = True,
        carries_coding: bool = False,
        one_host: bool = False,
    ) -> None:
        self._grid = grid
        self._carries = carries and grid.rows == 1
        row: type[Steering] = Steering if grid.rows == 1 else RowSteering
        self._row = (row if adaptive else FixedSteering)(
            rank=rank,
            members=grid.row(rank),
            deadline_s=deadline_s,
            straggler_share=straggler_share,
            one_host=one_host,
        )
        self._column = (
            (ColumnSteering if adaptive else FixedSteering)(
                rank=rank,
                members=grid.column(rank),
                deadline_s=COLUMN_SHARE * deadline_s,
                straggler_share=straggler_share,
                whose="the sum that was brought for its row by rank",
            )
            if grid.rows > 1
            else None
        )
        self._rank = rank
        self._over_budget = over_budget
        self.spending = Spending(budget)
        self._planes: PlanesPolicy = (
            FixedPlanes(grid.ranks, planes, coding_carried=carries_coding)
            if planes
            else AdaptivePlanes(grid.ranks, budget, trimmable=trimmable, coding_carried=carries_coding)
        )
        # Each lane numbers its own ops, so there is no op from which on all ranks could change the factor.
        self._lr = LrOffer(offers=rank == 0 and lanes == 1)

    def terms(self, length: int, *, keyed: bool = True) -> _native.Terms:
        """The terms of the next op of a bucket of this many coordinates. Without a key nothing is carried."""
        planes = self._planes.choice
        offer = self._lr.latest
        terms = _native.Terms(
            self._row.native_bounds(size_of(length, *planes), carried=self._carries and keyed),
            planes.scatter,
            self._row.incast,
            gather_planes=planes.gather,
            whole=self._planes.whole,
            skip_above=self.spending.budget if self._over_budget == "skip" else 0.0,
            lr_scale=offer.scale if offer else 0.0,
            lr_period=offer.period if offer else 0,
        )
        if self._column is None:
            return terms
        length = self._grid.column_length(length)
        return terms.with_column(self._column.native_bounds(length, carried=False), self._column.incast)

    def after(self, report: Report, now_s: float) -> Report:
        """Learn from an op that ended at ``now_s``; called in the order of ending. Returns its report with
        verdicts."""
        if self._column is not None:
            for column in report.column:
                self._column.after(column, now_s)
        self.spending.after(report)
        self._planes.after(report, self.spending, now_s)
        self._lr.after(report, self.spending.recent)
        budget = self.spending.budget
        room = max(LATE_SHARE * budget, budget - self._planes.least_error)
        self._row.hurried = self.spending.total.late < room
        self._row.patient = self._over_budget == "wait" and self.spending.over
        return self._row.after(report, now_s)

    def after_fetch(self, report: Report) -> None:
        """Learn from an op of which this rank has only taken the mean: the factor of the learning rate."""
        self._lr.after(report, self.spending.recent)

    def excess(self) -> BudgetExceeded | None:
        """The error that ``wait()`` raises if the ops have cost too much and the user wants to be told."""
        if self._over_budget != "raise" or not self.spending.over:
            return None
        return BudgetExceeded(
            f"the latest ops added ε = {self.spending.recent} to the mean gradient, and the budget is "
            f"{self.spending.budget:.1%}: allow more (budget=), or go on regardless (over_budget='proceed')"
        )

    @property
    def lr_scale(self) -> float:
        """1/(1 + ε), the same on all ranks in the same op: a factor for the learning rate."""
        return self._lr.scale

    @property
    def known_bounds(self) -> dict[int, OpBounds]:
        """The bounds of every size in use."""
        return self._row.known_bounds

    @property
    def drop_share(self) -> tuple[float, ...]:
        """By rank: the share of the latest ops in which its contribution to this rank's shard was not
        used."""
        return self._grid.spread(self._row.drop_share, self._rank, 0.0)

    @property
    def verdicts(self) -> tuple[dict[str, int], ...]:
        """By rank: how often each verdict was given. It is empty for ranks outside the row."""
        return self._grid.spread(self._row.verdicts, self._rank, {})

    @property
    def standings(self) -> tuple[Standing, ...]:
        """By rank: whether it is late, slow, stuck or dead. Ranks outside the row count as on time."""
        return self._grid.spread(self._row.standings, self._rank, ON_TIME_STANDING)

    @property
    def mean_planes(self) -> int:
        """Of the means of this rank's next op; others choose alike."""
        return self._planes.choice.gather

    def describe(self) -> str:
        """The derived bounds, in words."""
        if self._column is None:
            return self._row.describe()
        return f"{self._grid.rows} rows of {self._grid.row_length} ranks; {self._row.describe()}"

    def describe_planes(self) -> str:
        """What ops begin with, in words."""
        return self._planes.describe()

    def take_alarms(self) -> list[str]:
        """The warnings that the user has not been told yet."""
        return self._row.take_alarms() + (self._column.take_alarms() if self._column is not None else [])

    def take_news(self) -> list[str]:
        """What was decided since the last call, and why; one rank prints it."""
        return self._planes.take_news()
