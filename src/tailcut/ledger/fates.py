"""What became of every granule of an op at one rank, as its record has it (docs/ledger.md).

Granules are runs, each the first one and the one after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tailcut.ledger.schema import Bytes
from tailcut.mirror import Stage

Runs = tuple[tuple[int, int], ...]

_SEQS = 1 << 32


class Cut(NamedTuple):
    """Packets of which only the first bytes came, and were used: ``times`` neighbours that came alike."""

    seq: int
    """Of their op."""
    stage: Stage
    source: int
    """SCATTER: the rank. GATHER: the shard."""
    first: int
    """Granule of the shard at which the first of them begins."""
    granules: int
    """Of each, as it was sent."""
    payload_bytes: int
    """Of each, as it came."""
    times: int
    late: bool = False
    """They were late for their op."""


class LateUse(NamedTuple):
    """Granules from ``first`` up to before ``last`` that were late for op ``seq``, and that op ``user`` has
    taken in."""

    user: int
    seq: int
    stage: Stage
    source: int
    """SCATTER: the rank. GATHER: the shard."""
    subtracted: bool
    """It had been added to an op that nobody applied."""
    first: int
    last: int


@dataclass(frozen=True)
class Fates:
    """One op at one rank. Without a ledger's fates (an op that was not reduced) all is empty."""

    granules: tuple[int, ...] = ()
    """By shard: how many there are."""
    contributions: tuple[Runs, ...] = ()
    """By rank: what of its contribution to this rank's shard is in the mean."""
    answered: tuple[Runs, ...] = ()
    """By shard: what of its mean came in time, with values or EMPTY."""
    empty: tuple[Runs, ...] = ()
    """By shard: of these, what came EMPTY."""
    cuts: tuple[Cut, ...] = ()
    uses: tuple[LateUse, ...] = ()
    """Late parts that were taken in since the record before."""
    stand_in: float = 0.0
    """The share of the own gradient that stands where a mean did not come."""
    stood_in: tuple[int, ...] = ()
    """The shards where it does."""
    mean_hash: int = 0
    """64 bits of the result in this rank's shard."""


def read_fates(source: Bytes, seq: int, own_shard: int) -> Fates:
    """The fates that follow the structs of a record."""
    granules: list[int] = []
    for _ in range(source.number()):
        granules.append((granules[-1] if granules else 0) + source.signed())
    if not granules:
        return Fates()
    contributions = tuple(_runs(source, granules[own_shard], True) for _ in granules)
    answered, empty = [], []
    for count in granules:
        answered.append(_runs(source, count, True))
        empty.append(_runs(source, count, False))
    cuts = tuple(_cut(source, seq) for _ in range(source.number()))
    uses = tuple(_use(source, seq) for _ in range(source.number()))
    stood_in = source.number()
    return Fates(
        granules=tuple(granules),
        contributions=contributions,
        answered=tuple(answered),
        empty=tuple(empty),
        cuts=cuts,
        uses=uses,
        stand_in=source.real() if stood_in else 0.0,
        stood_in=tuple(source.number() for _ in range(stood_in)),
        mean_hash=int.from_bytes(source.take(8), "little"),
    )


def _runs(source: Bytes, granules: int, inside: bool) -> Runs:
    lengths = [source.number() for _ in range(source.number())]
    lengths.append(granules - sum(lengths))
    runs, at = [], 0
    for length in lengths:
        if inside and length:
            runs.append((at, at + length))
        at += length
        inside = not inside
    return tuple(runs)


def _stage(bit: int) -> Stage:
    return "gather" if bit else "scatter"


def _cut(source: Bytes, seq: int) -> Cut:
    age, place = source.number(), source.number()
    first, granules, payload_bytes, times = (source.number() for _ in range(4))
    late = bool(place >> 1 & 1)
    return Cut(
        (seq - age) % _SEQS, _stage(place & 1), place >> 2, first, granules, payload_bytes, times, late
    )


def _use(source: Bytes, seq: int) -> LateUse:
    user = seq + source.signed()
    age, place, first, count = (source.number() for _ in range(4))
    return LateUse(
        user, (user - age) % _SEQS, _stage(place & 1), place >> 2, bool(place >> 1 & 1), first, first + count
    )


def count_of(runs: Sequence[tuple[int, int]]) -> int:
    """How many granules that is."""
    return sum(last - first for first, last in runs)
