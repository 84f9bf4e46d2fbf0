"""The ranks of a group as rows of neighbours and columns of the same place in each row (docs/grid.md).

Owns who is in whose row and column, and when a group becomes a grid. What an op does with it is in
native/protocol/grid.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tailcut import _native
from tailcut.errors import ConfigError

T = TypeVar("T")

LEAST_RANKS = 128
"""Smaller groups are flat. In a grid a dead rank costs its row a whole shard; it saves packets and peers,
which a rank of a small group has few of."""

LEAST_ROWS = 4
"""Fewer rows, or shorter ones, save too little."""


@dataclass(frozen=True)
class GridLayout:
    ranks: int
    rows: int = 1
    """One: a flat group, which is one row and has no columns."""

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
        """Ranks that send to one, and itself: they share what it can take."""
        return self.ranks if self.rows == 1 else self.row_length + self.rows - 1

    def row(self, rank: int) -> range:
        """The ranks of its row."""
        begin = rank // self.row_length * self.row_length
        return range(begin, begin + self.row_length)

    def column(self, rank: int) -> range:
        """The ranks with the same place in their rows."""
        return range(rank % self.row_length, self.ranks, self.row_length)

    def column_length(self, length: int) -> int:
        """Coordinates in the column of an op of so many: those of a shard of a row, in whole granules."""
        return -(-length // (self.row_length * _native.GRANULE)) * _native.GRANULE

    def spread(self, values: Sequence[T], rank: int, elsewhere: T) -> tuple[T, ...]:
        """By rank of the group what is known by rank of the row."""
        if self.rows == 1 or not values:
            return tuple(values)
        row = self.row(rank)
        return tuple(values[r - row.start] if r in row else elsewhere for r in range(self.ranks))


def rows_for(ranks: int) -> int:
    """As many rows as a row is long, or the next smaller divisor; 1 for small groups and awkward numbers."""
    if ranks < LEAST_RANKS:
        return 1
    divisors = [rows for rows in range(LEAST_ROWS, ranks) if rows * rows <= ranks and ranks % rows == 0]
    return max(divisors, default=1)


def grid_of(ranks: int, rows: int, multicast: str = "off") -> GridLayout:
    """What all ranks come to alike. ``rows``: 0 chooses."""
    if rows > 1 and multicast != "off":
        raise ConfigError(
            f"rows={rows} and multicast={multicast!r}: a grid has no multicast; turn one of them off"
        )
    if rows == 0:
        rows = 1 if multicast != "off" else rows_for(ranks)
    return GridLayout(ranks, rows)
