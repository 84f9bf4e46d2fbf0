"""ε: the error energy that an op adds to the mean gradient, over the energy of that mean (docs/budget.md).

Owns what follows from the sums of squares that owners and receivers keep. Knows nothing of budgets.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tailcut import _native

_DISTORTION = _native.codec_distortion()

SHARED_ERROR = (0.53, 0.21, 0.116, 0.07, 0.042)
"""By planes, from 1 on: errors of ranks whose vectors have the correlation ρ correlate by this times ρ³, as
they share a rotation. From the Hermite series of the code's cells, at ρ = 0.9; more planes: none."""

LEAST_MEAN = 0.02
"""The mean's energy without its error is at least this share of what was measured: beyond, all is noise."""


CORRELATION_ROUNDS = 3
"""The correlation follows from the mean without its error, and the error from the correlation."""


class Epsilon(NamedTuple):
    """The NMSE of the averaged gradient, by source."""

    quantized: float = 0.0
    """By the planes that were sent, in both stages."""
    trimmed: float = 0.0
    """By what switches cut off."""
    lost: float = 0.0
    """By what did not come, or too late."""
    absent: float = 0.0
    """By ranks that were not there to contribute: a smaller batch, and not in ``total``."""

    @property
    def total(self) -> float:
        """What counts against the budget."""
        return self.quantized + self.trimmed + self.lost

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value:.2%}" for name, value in self._asdict().items() if value > 5e-5)
        return f"{self.total:.2%}" + (f" ({parts})" if parts else "")


NO_ERROR = Epsilon()


class Quality(NamedTuple):
    """What the sums of squares of one op say."""

    epsilon: Epsilon
    correlation: float
    """Between the contributions of two ranks, on average: 0 independent, 1 all alike."""


PERFECT = Quality(NO_ERROR, 0.0)


def quality_of(energies: _native.Energies, *, ranks: int, live: int, rows: int = 1) -> Quality:
    """``ranks`` of the row that the op ran in, of which ``live`` were expected to contribute; ``rows`` like
    it: errors of their sums average out."""
    contributed, mean = energies.contributed, energies.mean
    nothing_missing = not energies.received_lost and energies.sampled * live <= contributed
    if nothing_missing and not energies.planes:  # raw, and most ops
        return PERFECT
    if not math.isfinite(mean + contributed + energies.received):  # an op with Inf or NaN
        return PERFECT
    if mean <= 0 or contributed <= 0:  # nothing but zeros, or nothing came
        return Quality(Epsilon(lost=_share(energies.received_lost, energies.received)), 0.0)
    # Owners reckon with Gaussian blocks, this rank has looked at its own: the others' are taken to be alike.
    quantized = energies.quantized / rows * _share(energies.sent_noise, energies.sent_nominal, 1.0)
    trimmed = energies.trimmed / rows
    count = rows * contributed / energies.sampled  # of contributions in a mean
    shared = 1.0  # errors of ranks that correlate do not average out
    for _ in range(CORRELATION_ROUNDS):
        clean = max(LEAST_MEAN * mean, mean - shared * (quantized + trimmed))
        correlation = correlation_of(count, clean / contributed)
        shared = 1 + max(0.0, count - rows - 1) * shared_error(energies.planes / contributed, correlation)
    quantized, trimmed = shared * quantized, shared * trimmed
    spread = (1 - correlation) * contributed / rows
    missing = energies.sampled / contributed - 1 / live
    whole = clean + energies.received  # the own shard does not travel
    return Quality(
        Epsilon(
            quantized=(quantized + energies.mean_quantized) / clean,
            trimmed=trimmed / clean + energies.received_trimmed / whole,
            lost=(spread * max(0.0, missing) + energies.void_mean) / clean + energies.received_lost / whole,
            absent=spread * max(0.0, 1 / live - 1 / ranks) / clean,
        ),
        correlation,
    )


def unbiased_nmse(planes: int) -> float:
    """The error of one unbiased message, as a share of its squared norm (docs/codec.md, table 1)."""
    return _DISTORTION[planes] / (1 - _DISTORTION[planes])


def correlation_of(count: float, mean_share: float) -> float:
    """Of ``count`` contributions whose mean has this share of the energy of one of them."""
    return min(1.0, max(0.0, (count * mean_share - 1) / (count - 1))) if count > 1 else 0.0


def shared_error(planes: float, correlation: float) -> float:
    """How much the errors of two ranks correlate."""
    place = round(planes) - 1
    return SHARED_ERROR[place] * correlation**3 if 0 <= place < len(SHARED_ERROR) else 0.0


def predicted(ranks: int, correlation: float, planes: int, gather_planes: int) -> float:
    """ε of an op that loses nothing, with these planes in SCATTER and GATHER.

    Of ``ranks`` contributions one is the owner's, which is not quantized.
    """
    share = (ranks - 1) / ranks / (1 + (ranks - 1) * correlation)
    shared = 1 + max(0, ranks - 2) * shared_error(planes, correlation)
    scatter = share * shared * unbiased_nmse(planes)
    return scatter + (1 + scatter) * unbiased_nmse(gather_planes)


def _share(part: float, whole: float, otherwise: float = 0.0) -> float:
    return part / whole if whole > 0 else otherwise
