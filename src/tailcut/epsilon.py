"""ε: the error energy that an op adds to the mean gradient, over the energy of that mean (docs/budget.md).

Owns what follows from the sums of squares that owners and receivers keep. It knows nothing of budgets.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tailcut import _native

_DISTORTION = _native.codec_distortion()

SHARED_ERROR = (0.53, 0.21, 0.116, 0.07, 0.042)
"""By planes, from 1 on. The errors of ranks share a rotation: if their vectors have the correlation ρ, their
errors correlate by this value times ρ³. From the Hermite series of the code's cells, at ρ = 0.9. With more
planes there is no such correlation."""

STALE_CONTRIBUTION, STALE_MEAN = 0.2, 0.35
"""What is late and carried costs this share of the rounds that it would cost if it were lost: the worst that
benchmarks/carried_rounds.py measures (docs/budget.md)."""

CARRIED_CODING = 0.15
"""What coding takes and the next op of the bucket brings back costs this share of the rounds that it would
cost if it were lost: more than benchmarks/carried_rounds.py measures (docs/budget.md)."""

LEAST_MEAN = 0.02
"""The mean's energy without its error is at least this share of what was measured; below that, all is
noise."""


CORRELATION_ROUNDS = 3
"""Rounds of an iteration: the correlation follows from the mean without its error, and the error from the
correlation."""


class Epsilon(NamedTuple):
    """The NMSE of the averaged gradient, by source."""

    quantized: float = 0.0
    """Caused by the number of planes that were sent, in both stages."""
    trimmed: float = 0.0
    """Caused by what switches cut off."""
    lost: float = 0.0
    """Caused by what did not come in time and is not carried."""
    late: float = 0.0
    """Caused by what did not come in time and enters a later op of the bucket (docs/late.md). Of its energy
    a measured share counts."""
    absent: float = 0.0
    """Caused by ranks that were not there to contribute. That is a smaller batch and not part of
    ``total``."""

    @property
    def total(self) -> float:
        """What counts against the budget."""
        return self.quantized + self.trimmed + self.lost + self.late

    def sources(self) -> str:
        """The sources in words, in parentheses; empty if there are none."""
        parts = ", ".join(f"{name} {value:.2%}" for name, value in self._asdict().items() if value > 5e-5)
        return f" ({parts})" if parts else ""

    def __str__(self) -> str:
        return f"{self.total:.2%}{self.sources()}"


NO_ERROR = Epsilon()


class Quality(NamedTuple):
    """What the sums of squares of one op say."""

    epsilon: Epsilon
    correlation: float
    """The average correlation between the contributions of two ranks: 0 is independent, 1 is all alike."""


PERFECT = Quality(NO_ERROR, 0.0)


def quality_of(
    energies: _native.Energies,
    *,
    ranks: int,
    live: int,
    rows: int = 1,
    carried: bool = False,
    gone_frac: float = 0.0,
    coding_carried: bool = False,
) -> Quality:
    """The quality of an op that ran in a row of ``ranks``, of which ``live`` were expected to contribute.
    There are ``rows`` such rows, and the errors of their sums average out. ``carried``: what did not come in
    time enters a later op, except for the share ``gone_frac`` of the means, whose owners are gone.
    ``coding_carried``: so does what coding takes."""

    def untimely(contributions: float, means: float) -> dict[str, float]:
        if not carried:
            return {"lost": contributions + means, "late": 0.0}
        follows = (1 - gone_frac) * means
        return {"lost": means - follows, "late": STALE_CONTRIBUTION * contributions + STALE_MEAN * follows}

    e = energies
    coded = e.planes or e.mean_quantized or e.void_coords or e.unseen_coords
    if not (coded or e.void_mean or e.received_lost) and e.sampled * live <= e.contributed:
        return PERFECT  # most ops of raw
    if not math.isfinite(e.mean + e.contributed + e.received):  # an op with Inf or NaN
        return PERFECT
    # Blocks that nobody has seen are taken to be like the rest.
    density = _share(e.mean + e.received, e.coords + e.received_coords)
    void, lost = e.void_mean + density * e.void_coords, e.received_lost + density * e.unseen_coords
    received = e.received + density * e.unseen_coords
    if e.mean + received <= 0:  # the values are all zero, or nothing came
        missing_all = void > 0 or e.void_coords > 0 or e.unseen_coords > 0
        return Quality(Epsilon(**untimely(0.0, 1.0)), 0.0) if missing_all else PERFECT
    if e.mean <= 0 or e.contributed <= 0:  # nothing of the own shard came
        whole = void + received
        return Quality(Epsilon(**untimely(_share(void, whole), _share(lost, whole))), 0.0)
    # Measured squares are those of the mean of all rows, nominal ones are those of the mean of one row.
    averaged = rows if e.coords else 1
    count = rows * e.contributed / e.sampled  # the number of contributions in a mean
    contributed = e.contributed * rows / averaged
    coding = CARRIED_CODING if coding_carried else 1.0
    quantized, trimmed, correlation = _coding_errors(e, count, contributed, averaged)
    spread = (1 - correlation) * contributed / rows  # the energy of one contribution around the mean
    missing = spread * max(0.0, e.sampled / e.contributed - 1 / live)
    absent = spread * max(0.0, 1 / live - 1 / ranks)
    least = LEAST_MEAN * e.mean
    # The mean of all ranks that were expected
    mean = max(least, e.mean - quantized - trimmed - missing) + void
    whole = mean + received  # the own shard does not travel
    return Quality(
        Epsilon(
            quantized=(coding * quantized + e.mean_quantized - (1 - CARRIED_CODING) * e.mean_carried) / mean,
            trimmed=trimmed / mean + e.received_trimmed / whole,
            **untimely(missing / mean + void / whole, lost / whole),
            absent=absent / max(least, mean - absent),
        ),
        correlation,
    )


def _coding_errors(
    e: _native.Energies, count: float, contributed: float, averaged: int
) -> tuple[float, float, float]:
    """The errors of the mean of ``count`` contributions, caused by the planes that were sent and by trimming,
    and the correlation that follows."""
    # Owners assume Gaussian blocks. This rank has measured its own blocks, and the others' are taken to be
    # alike.
    quantized = e.quantized / averaged * _share(e.sent_noise, e.sent_nominal, 1.0)
    trimmed = e.trimmed / averaged
    correlation, shared = 0.0, 1.0  # errors of ranks that correlate do not average out
    for _ in range(CORRELATION_ROUNDS):
        clean = max(LEAST_MEAN * e.mean, e.mean - shared * (quantized + trimmed))
        correlation = correlation_of(count, clean / contributed)
        shared = 1 + max(0.0, count - 2) * shared_error(e.planes / e.contributed, correlation)
    return shared * quantized, shared * trimmed, correlation


def unbiased_nmse(planes: int) -> float:
    """The error of one unbiased message, as a share of its squared norm (docs/codec.md, table 1)."""
    return _DISTORTION[planes] / (1 - _DISTORTION[planes])


def correlation_of(count: float, mean_share: float) -> float:
    """The correlation of ``count`` contributions whose mean has this share of the energy of one of them."""
    return min(1.0, max(0.0, (count * mean_share - 1) / (count - 1))) if count > 1 else 0.0


def shared_error(planes: float, correlation: float) -> float:
    """How much the errors of two ranks correlate."""
    place = round(planes) - 1
    return SHARED_ERROR[place] * correlation**3 if 0 <= place < len(SHARED_ERROR) else 0.0


def predicted(
    ranks: int, correlation: float, planes: int, gather_planes: int, *, coding_carried: bool = False
) -> float:
    """ε of an op that loses nothing, with these planes in SCATTER and GATHER.

    One of the ``ranks`` contributions is the owner's, which is not quantized.
    """
    share = (ranks - 1) / ranks / (1 + (ranks - 1) * correlation)
    shared = 1 + max(0, ranks - 2) * shared_error(planes, correlation)
    scatter = share * shared * unbiased_nmse(planes)
    lost = scatter + (1 + scatter) * unbiased_nmse(gather_planes)
    return CARRIED_CODING * lost if coding_carried else lost


def _share(part: float, whole: float, otherwise: float = 0.0) -> float:
    return part / whole if whole > 0 else otherwise
