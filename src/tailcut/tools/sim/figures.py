"""Makes figures from a simulated run: pure functions and frozen values, no printing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

PREFIX_NMSE = (1.0, 0.3634, 0.1194, 0.0348, 0.00955, 0.00253, 6.5e-4, 1.66e-4, 4.25e-5)
"""The NMSE of the first b bits of a coordinate (docs/codec.md). After eight, each bit divides it by four."""

MOST_UNBIASING = 4
"""The codec scales the rest of a block by at most this factor."""


@dataclass(frozen=True)
class Losses:
    """What happened to packets that did not come in time, as shares of all that were sent."""

    lost: float = 0.0
    """Lost at random in the network."""
    queue: float = 0.0
    """Dropped at a full port, or at the socket of a rank that stood still."""
    late: float = 0.0
    """Came after the end of their stage."""
    trimmed: float = 0.0
    dropped_rank: float = 0.0
    """Lost on a link that was down, or sent to a rank that was gone."""


@dataclass(frozen=True)
class Side:
    """One side of a row: the time of every op at every rank after the warm-up, and what was lost."""

    times_s: Numbers
    bound_s: float
    """The least time possible: 2(N-1)/N times the bucket, at the rate of a port."""
    unfinished: int = 0
    """How many ops never ended, over all ranks."""
    delivered: float = 1.0
    """The share of results that came in time. Every contribution to them counts alike."""
    by_next_op: float = 1.0
    """The share of means that came by the end of the rank's next op, in time or for repair."""
    nmse: float = 0.0
    nmse_is_measured: bool = True
    losses: Losses = field(default_factory=Losses)
    notes: dict[str, Any] = field(default_factory=dict)

    def percentile_s(self, q: float) -> float:
        """The smallest time that at least q % of the ops do not exceed; infinite if that many never ended."""
        if not len(self.times_s):
            return float("inf")
        never = np.full(self.unfinished, np.inf)
        return float(np.percentile(np.concatenate([self.times_s, never]), q, method="inverted_cdf"))

    @property
    def tail(self) -> float:
        p50_s = self.percentile_s(50)
        return self.percentile_s(99) / p50_s if np.isfinite(p50_s) else float("nan")

    @property
    def goodput(self) -> float:
        """The bound over the median time. 1 is a network that does nothing else."""
        return self.bound_s / self.percentile_s(50)


def prefix_weight(planes: int) -> float:
    """The share of a coordinate's energy that this many bits hold: one minus their NMSE."""
    known = len(PREFIX_NMSE) - 1
    return 1 - PREFIX_NMSE[min(planes, known)] / 4.0 ** max(0, planes - known)


def trimmed_weight(granules: int, planes: int, kept_bytes: int) -> float:
    """The mean weight of a packet cut to ``kept_bytes`` of payload. Some granules keep one bit more."""
    bits, rest_bytes = divmod(kept_bytes, 8 * granules)
    if bits >= planes:
        return prefix_weight(planes)
    longer = rest_bytes // 8 / granules
    return longer * prefix_weight(bits + 1) + (1 - longer) * prefix_weight(bits)


def raw_nmse(present: float, answered: Numbers) -> float:
    """The NMSE of averaged independent vectors of equal norms, such as the buckets of a simulation.

    ``present`` is the share of contributions that owners got. ``answered`` is the share of the result that
    came, by rank. A mean of n of N errs by N/n - 1, a result that did not come by 1.
    """
    return float(np.mean(answered / max(present, 1e-9) - answered + (1 - answered)))


def planes_nmse(present: float, answered: Numbers, weight: float, ranks: int) -> float:
    """The same in the rotated domain, where what is missing has the weight 0 and the rest is scaled.

    ``weight`` is the mean weight of packets that came. With weights w the mean of contributions errs by
    1/mean(w) - 1, and so does the mean on its way back. The contribution of the owner itself is whole.
    """
    contributions = max(1 / ranks, present * (weight * (ranks - 1) + 1) / ranks)
    means = np.maximum(1 / MOST_UNBIASING, answered * (weight * (ranks - 1) / ranks + 1 / ranks))
    return float(np.mean(np.where(answered > 0, 1 / contributions / means - 1, 1.0)))
