"""Drift as a number: fingerprints of blocks, and what two of them tell about the blocks' difference.

A fingerprint is a hash, which says whether blocks are equal, and a sketch for each name in the block, from
which the norm of their difference is estimated. Copies nothing between ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from tailcut.pytorch.blocks import BLOCK, Segment

SKETCH = 64
"""Sums in a sketch: the estimated norm errs by about 1/√(2 · 64) = 9 %."""

Words = npt.NDArray[np.uint64]


def random_signs(seed: int) -> torch.Tensor:
    """One for each coordinate of a block, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    return 2.0 * torch.randint(0, 2, (BLOCK,), generator=generator).double() - 1.0


def words_of(names: int) -> int:
    """The length of a fingerprint."""
    return 1 + SKETCH * names


def fingerprint(copies: Sequence[Segment], signs: torch.Tensor) -> Words:
    """Of copies in host memory, ordered by name."""
    digest = hashlib.blake2b(digest_size=8)
    sketches = []
    for name, group in groupby(copies, lambda segment: segment.name):
        values = [segment.values for segment in group]
        digest.update(name.encode())
        for part in values:
            digest.update(part.view(torch.uint8).numpy().data)
        sketches.append(_sketch(torch.cat(values), signs))
    hashed = np.frombuffer(digest.digest(), np.uint64)
    return np.concatenate([hashed, *(sketch.view(np.uint64) for sketch in sketches)])


def _sketch(values: torch.Tensor, signs: torch.Tensor) -> npt.NDArray[np.float64]:
    """Signed sums over every 64th coordinate. Their squares add up to the squared norm in expectation."""
    signed = values.double() * signs[: len(values)]
    padded = torch.nn.functional.pad(signed, (0, -len(values) % SKETCH))
    return padded.view(-1, SKETCH).sum(0).numpy()


def differences(one: Words, other: Words) -> list[float]:
    """The estimated norm of the difference, by name; all 0 if the hashes say that the blocks are equal."""
    names = (len(one) - 1) // SKETCH
    if one[0] == other[0]:
        return [0.0] * names
    apart = (one[1:].view(np.float64) - other[1:].view(np.float64)).reshape(names, SKETCH)
    return [float(math.sqrt(total)) for total in np.square(apart).sum(1)]


def norms(copies: Sequence[Segment]) -> list[float]:
    """By name."""
    return [
        math.sqrt(sum(float(segment.values.double().square().sum()) for segment in group))
        for _, group in groupby(copies, lambda segment: segment.name)
    ]


def ratio(difference: float, norm: float) -> float:
    return difference / norm if norm > 0 else math.inf if difference > 0 else 0.0
