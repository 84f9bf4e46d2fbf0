"""The ranks of a group in rows of neighbours, and columns with one rank of each row (docs/grid.md).

Owns who is in which row and column, and which groups become grids. Knows nothing of what an op does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tailcut import _native
from tailcut.errors import ConfigError

T = TypeVar("T")

LEAST_RANKS = 128
"""Smaller groups are flat. A grid saves packets and peers, and a small group has few of both. In return, a
dead rank costs its row a whole shard until the others own it."""

LEAST_ROWS = 4
"""A grid with fewer or shorter rows saves too little."""


@dataclass(frozen=True)
class GridLayout:
    """Which ranks are in the row and in the column of a rank."""

    ranks: int
    rows: int = 1
    """With 1 the group is flat: it has one row and no columns."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.ranks % self.rows:
            raise ConfigError(f"rows={self.rows} must divide the number of ranks, {self.ranks}")
        if 1 < self.rows == self.ranks:
            raise ConfigError(f"rows={self.rows} leaves one rank in a row; take fewer rows")

    @property
    def row_length(self) -> int:
        return self.ranks // self.rows

    @property
    def senders(self) -> int:
        """How many ranks share what one rank can receive: those that send to it, and itself."""
        return self.ranks if self.rows == 1 else self.row_length + self.rows - 1

    def row(self, rank: int) -> range:
        """The ranks in the row of this rank."""
        begin = rank // self.row_length * self.row_length
        return range(begin, begin + self.row_length)

    def column(self, rank: int) -> range:
        """The ranks that have the same place in their rows as this rank."""
        return range(rank % self.row_length, self.ranks, self.row_length)

    def column_length(self, length: int) -> int:
        """The length of a column's op: that of a shard of the row, in whole granules."""
        return -(-length // (self.row_length * _native.GRANULE)) * _native.GRANULE

    def spread(self, values: Sequence[T], rank: int, elsewhere: T) -> tuple[T, ...]:
        """Values by rank of the row, as values by rank of the group. Other rows get ``elsewhere``."""
        if self.rows == 1 or not values:
            return tuple(values)
        row = self.row(rank)
        return tuple(values[r - row.start] if r in row else elsewhere for r in range(self.ranks))


def rows_for(ranks: int) -> int:
    """The number of rows that a group of this size gets: as many as a row is long, or the next smaller
    divisor. It is 1 for small groups and for numbers without such a divisor."""
    if ranks < LEAST_RANKS:
        return 1
    divisors = [rows for rows in range(LEAST_ROWS, ranks) if rows * rows <= ranks and ranks % rows == 0]
    return max(divisors, default=1)


def grid_of(ranks: int, rows: int, multicast: str = "off") -> GridLayout:
    """The layout on which all ranks decide alike. With 0 ``rows`` the number of ranks decides."""
    if rows > 1 and multicast != "off":
        raise ConfigError(
            f"rows={rows} and multicast={multicast!r}: a grid has no multicast; turn one of them off"
        )
    if rows == 0:
        rows = 1 if multicast != "off" else rows_for(ranks)
    return GridLayout(ranks, rows)
