"""The code of docs/codec.md in NumPy: cells, what their prefixes decode to, weights, and measured gains.

Computed from the normal distribution alone. Shares no table and no polynomial with the core.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist

import numpy as np

from tests.rotation import MASK, mix

GRANULE = 64
PLANES = 16
SPREAD = 1.6
TABLE_BITS = 11
"""Up to these a cell decodes to its mean; beyond, cells are so small that their middles do."""
MEASURED_BITS = 9
"""From ten bits on no gain is measured."""
GAUSSIAN_COORDINATES = 4096
"""A block whose norm is shared by fewer is measured."""
FAR = 5.0
"""A mean over different ranks in different granules is scaled so that none of it is further out, in σ."""

EDGE = 0.1
"""How close a coordinate is to the end of its cell, in cells of all planes, for its code to be in doubt: the
core takes a polynomial for the distribution, which is 0.05 off."""


@cache
def centroids_of(bits: int) -> tuple[np.ndarray, float]:
    """The means of the positive cells of so many bits, and D_b."""
    normal, half = NormalDist(), 2 ** (bits - 1)
    edges = [SPREAD * normal.inv_cdf(0.5 + k / (2 * half)) for k in range(half)] + [math.inf]
    above = np.array([0.5 * math.erfc(e / math.sqrt(2)) for e in edges])
    height = np.array([math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in edges])
    share, moment = above[:-1] - above[1:], height[:-1] - height[1:]
    return moment / share, 1 - 2 * float((moment**2 / share).sum())


@cache
def decoded(bits: int) -> np.ndarray:
    """By the first ``bits`` bits of a code: the mean of its cell, or its middle on the chord of a piece."""
    means = centroids_of(bits)[0] if bits <= TABLE_BITS else chords(bits)
    return np.concatenate([-means[::-1], means])


def chords(bits: int) -> np.ndarray:
    """Of positive cells: where they have their middles if each of 2048 pieces is cut evenly."""
    normal, pieces = NormalDist(), 2**TABLE_BITS
    ends = [SPREAD * normal.inv_cdf(0.5 + k / (2 * pieces)) for k in range(pieces)]
    ends.append(2 * SPREAD * normal.inv_cdf(1 - 0.25 / pieces) - ends[-1])  # the last has its median there
    cells = 2 ** (bits - 1 - TABLE_BITS)
    begin, width = np.array(ends[:-1]), np.diff(ends)
    return (begin[:, None] + width[:, None] * (np.arange(cells) + 0.5) / cells).reshape(-1)


@cache
def _grid() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points of a grid of 1/1024, Φ and its density there."""
    points = np.arange(-8192, 8193) / 1024
    phi = [0.5 * math.erfc(-x / math.sqrt(2)) for x in points]
    return points, np.array(phi), np.exp(-points * points / 2) / math.sqrt(2 * math.pi)


def places_of(y: np.ndarray) -> np.ndarray:
    """65536·Φ(y/1.6), whose whole part is the code: Taylor's series from the next point of a grid."""
    points, phi, density = _grid()
    y = np.clip(y / SPREAD, -8, 8)
    at = np.rint(y * 1024).astype(int) + 8192
    x, t = points[at], y - points[at]
    series = 1 + t * (-x / 2 + t * ((x * x - 1) / 6 - t * x * (x * x - 3) / 24))
    return 2**PLANES * (phi[at] + density[at] * t * series)


def prefix(places: np.ndarray, bits: np.ndarray | int) -> np.ndarray:
    """What so many bits of each code decode to; 0 for none."""
    codes = np.clip(np.floor(places).astype(int), 0, 2**PLANES - 1)
    each = np.broadcast_to(bits, codes.shape)
    out = np.zeros(codes.shape)
    for b in np.flatnonzero(np.bincount(each)):
        if b:
            at = each == b
            out[at] = decoded(int(b))[codes[at] >> (PLANES - b)]
    return out


@dataclass(frozen=True, eq=False)
class Coded:
    """A rotated block as its sender codes it."""

    z: np.ndarray
    sigma: float
    planes: int
    key: int
    far_from_gaussian: bool
    """Its gains are measured."""
    doubt: np.ndarray
    """By which the core's z may be off: it was decoded, and something lay at the edge of a cell."""
    doubtful_scale: bool = False
    """Whether its scale may be off for the same reason."""

    def values(self, bits: np.ndarray) -> np.ndarray:
        """c_b(q)·σ by coordinate, from the bits by granule."""
        return self.sigma * prefix(self._places[0], np.repeat(bits, GRANULE))

    def doubts(self, bits: np.ndarray) -> np.ndarray:
        """By which the core's values may be off."""
        low, high = (prefix(self._places[side], np.repeat(bits, GRANULE)) for side in (-1, 1))
        return self.sigma * (high - low)

    def weights(self, bits: np.ndarray) -> np.ndarray:
        """w_b by granule, as exactly as the core adds them up: in single precision."""
        nominal = np.array([1 - distortion(b) for b in range(PLANES + 1)], np.float32)
        gain = np.clip(np.float32(1) + self._deviations[0], np.float32(1 / 64), np.float32(4096))
        return (nominal * gain)[bits]

    def doubtful_weights(self, bits: np.ndarray) -> bool:
        """Whether the weights of these bits hang on coordinates at the edge of a cell."""
        spread = np.abs(self._deviations[1] - self._deviations[-1])
        return self.doubtful_scale or bool(spread[bits].max() > 1e-5)

    @cached_property
    def _places(self) -> dict[int, np.ndarray]:
        """Of every coordinate: 0 as it is, -1 and 1 as low and as high as it may be."""
        unit = 1 / self.sigma if self.sigma else 0.0
        places = places_of(self.z * unit)
        low, high = places - EDGE, places + EDGE
        vague = self.doubt > 0
        low[vague] = places_of((self.z - self.doubt)[vague] * unit) - EDGE
        high[vague] = places_of((self.z + self.doubt)[vague] * unit) + EDGE
        return {-1: low, 0: places, 1: high}

    @cached_property
    def _deviations(self) -> dict[int, np.ndarray]:
        """r_b = <z, Q_b z> / ((1 - D_b)·|z|²) - 1 on a sample, in half precision; 0 if it is not measured."""
        found = {side: np.zeros(PLANES + 1, np.float32) for side in (-1, 0, 1)}
        if not self.far_from_gaussian:
            return found
        sample = sample_of(self.z.size, self.key)
        y = self.z[sample] / self.sigma
        for side, deviations in found.items():
            for b in range(1, min(self.planes, MEASURED_BITS) + 1):
                held = float(y @ prefix(self._places[side][sample], b)) / float(y @ y)
                deviations[b] = np.float16(np.clip(held / (1 - distortion(b)) - 1, -0.96875, 4095.0))
        return found


def distortion(bits: int) -> float:
    """D_b."""
    return centroids_of(bits)[1] if bits else 1.0


def sample_of(length: int, key: int) -> np.ndarray:
    """Where gains are measured: eight neighbours in each of 64 strata."""
    strata = min(64, length // 8)
    stratum = length // strata
    return np.concatenate(
        [
            s * stratum + mix((mix(key ^ 0x6761696E) + s) & MASK) % (stratum // 8) * 8 + np.arange(8)
            for s in range(strata)
        ]
    )


def coded_contribution(x: np.ndarray, z: np.ndarray, planes: int, key: int) -> Coded:
    """A block of a bucket: ``x`` before its rotation, ``z`` after it."""
    squares, fourths = float((x * x).sum()), float((x * x * x * x).sum())
    gaussian = squares == 0 or squares**2 > GAUSSIAN_COORDINATES * fourths
    return Coded(z, math.sqrt(squares / x.size), planes, key, not gaussian, np.zeros(z.size))


def coded_mean(
    m: np.ndarray,
    doubt: np.ndarray,
    present: np.ndarray,
    planes: int,
    key: int,
    *,
    gaussian: bool,
    even: bool,
    doubtful_weights: bool,
) -> Coded:
    """A block of a mean. ``present``: by granule, whether anybody contributed; ``even``: the same ranks."""
    count, energy = GRANULE * int(present.sum()), float((m * m).sum())
    sigma = math.sqrt(energy / count) if count else 0.0
    if not even:
        sigma = max(sigma, float(np.abs(m).max()) / FAR)
    far = not (gaussian and even) and sigma > 0
    doubtful_scale = doubtful_weights or float((doubt * doubt).sum()) > 1e-7 * energy
    return Coded(m, sigma, planes, key, far, doubt, doubtful_scale)


def bits_left(granules: int, planes: int, table_bytes: int, payload_bytes: int) -> np.ndarray:
    """By granule: how many bits are in the first ``payload_bytes`` of a packet."""
    plane_bytes = 8 * granules
    if payload_bytes < plane_bytes:
        whole, rest = 0, payload_bytes
    elif payload_bytes < plane_bytes + table_bytes:
        whole, rest = 1, 0
    else:
        whole, rest = divmod(payload_bytes - table_bytes, plane_bytes)
    bits = np.full(granules, whole)
    bits[: rest // 8] += 1
    return np.minimum(bits, planes)
