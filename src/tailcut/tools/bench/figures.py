"""Makes figures from samples: pure functions and frozen values, no processes and no printing."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from tailcut.errors import TailcutError
from tailcut.tools.bench.worker import Samples


class WrongResultError(TailcutError):
    """An op of a benchmark gave a wrong result although its report says that everything was delivered."""


@dataclass(frozen=True)
class Round:
    """One round of one side with one bucket. Each tuple has an entry for each op, over all ranks."""

    slowest_s: tuple[float, ...]
    delivered: tuple[float, ...]
    """The share that was delivered: the mean over ranks."""
    nmse: tuple[float, ...]
    """The NMSE of the worst rank."""
    trimmed: tuple[int, ...] = ()
    """The number of trimmed packets, over all ranks."""
    wire_bytes: float | None = None
    """On a testbed: the bytes of all frames that left the switch, per op."""

    @property
    def p50_s(self) -> float:
        return percentile(self.slowest_s, 50)

    @property
    def p99_s(self) -> float:
        return percentile(self.slowest_s, 99)


@dataclass(frozen=True)
class Figures:
    """All rounds of one side with one bucket."""

    ranks: int
    count: int
    rounds: tuple[Round, ...]

    @property
    def size_bytes(self) -> int:
        return 4 * self.count

    @property
    def p50_s(self) -> float:
        return percentile([t for r in self.rounds for t in r.slowest_s], 50)

    @property
    def p99_s(self) -> float:
        return percentile([t for r in self.rounds for t in r.slowest_s], 99)

    @property
    def max_s(self) -> float:
        return percentile([t for r in self.rounds for t in r.slowest_s], 100)

    @property
    def wire_bytes(self) -> float | None:
        counted = [r.wire_bytes for r in self.rounds if r.wire_bytes is not None]
        return median(counted) if counted else None

    @property
    def trimmed(self) -> float:
        """The number of trimmed packets per op, over all ranks."""
        return float(np.mean([n for r in self.rounds for n in r.trimmed]))

    @property
    def algbw(self) -> float:
        """The bucket size over the median time, in bytes per second, as nccl-tests defines it."""
        return self.size_bytes / self.p50_s

    @property
    def busbw(self) -> float:
        """algbw times 2(n-1)/n, which each rank sends and receives. It compares across numbers of ranks."""
        return self.algbw * 2 * (self.ranks - 1) / self.ranks

    @property
    def delivered(self) -> float:
        return float(np.mean([d for r in self.rounds for d in r.delivered]))

    @property
    def nmse(self) -> float:
        return float(np.mean([e for r in self.rounds for e in r.nmse]))


@dataclass(frozen=True)
class Ratio:
    """The time of the other side over that of tailcut, for each round. Above 1, tailcut is faster."""

    by_round: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.by_round)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.by_round), max(self.by_round)


def percentile(values: list[float] | tuple[float, ...], q: float) -> float:
    """The smallest value that at least q % of the values do not exceed. It is one of the values."""
    return float(np.percentile(values, q, method="inverted_cdf"))


def judge(by_rank: list[Samples], count: int, wire_bytes: int | None = None) -> Round:
    """One round from the samples of all ranks and the bytes that the step sent.

    Raises WrongResultError if an op that was delivered is wrong on any rank.
    """
    side = by_rank[0].side
    ops = list(zip(*(samples.ops for samples in by_rank), strict=True))
    for op_index, op in enumerate(ops):
        wrong = [rank for rank, sample in enumerate(op) if not sample.correct]
        if wrong and all(sample.delivered == 1.0 and sample.trimmed == 0 for sample in op):
            raise WrongResultError(
                f"{side} returned a wrong result: {count} coordinates over {len(by_rank)} ranks, round "
                f"{by_rank[0].round_index}, op {op_index}: everything was delivered, yet ranks {wrong} "
                f"differ from the mean (NMSE {max(sample.nmse for sample in op):.3g})"
            )
    return Round(
        slowest_s=tuple(max(sample.elapsed_s for sample in op) for op in ops),
        delivered=tuple(float(np.mean([sample.delivered for sample in op])) for op in ops),
        nmse=tuple(max(sample.nmse for sample in op) for op in ops),
        trimmed=tuple(sum(sample.trimmed for sample in op) for op in ops),
        wire_bytes=None if wire_bytes is None else wire_bytes / len(ops),
    )


def ratio(other: Figures, own: Figures, q: float) -> Ratio:
    """How many times longer the other side takes, at percentile q of each round."""
    pairs = zip(other.rounds, own.rounds, strict=True)
    return Ratio(tuple(percentile(o.slowest_s, q) / percentile(t.slowest_s, q) for o, t in pairs))


def wire_ratio(other: Figures, own: Figures) -> Ratio | None:
    """How many times more bytes the other side puts on the wire."""
    pairs = [(o.wire_bytes, t.wire_bytes) for o, t in zip(other.rounds, own.rounds, strict=True)]
    ratios = [o / t for o, t in pairs if o is not None and t]
    return Ratio(tuple(ratios)) if ratios else None
