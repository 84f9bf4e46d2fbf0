"""What coding has taken from the latest op of each bucket: it enters the bucket's next op (docs/late.md).

Owns that memory between ops, and looks after lengths and scales. The core adds it to a contribution and
leaves what is new.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from tailcut import _native
from tailcut.config import Config
from tailcut.engine.buffers import Bucket
from tailcut.grid import GridLayout


def carries_coding(config: Config, codec: str, grid: GridLayout) -> bool:
    """Whether a group keeps residues: not of so many planes that coding takes next to nothing."""
    kept = config.late == config.residue == "carry" and config.planes <= _native.CARRIED_PLANES
    return kept and codec == "planes" and grid.rows == 1


UNUSED_OPS = 8
"""A bucket that took part in none of so many ops for each that is kept is gone: DDP makes others after its
first step."""


@dataclass
class _Residue:
    values: Bucket
    loss_scale: float
    used: int = 0  # in which op


class Residues:
    """Those of one rank, by key. The memory of an op in flight is its caller's to keep."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Residue] = {}  # the one that was used last at the end
        self._ops = 0

    def of(self, key: Hashable, length: int, loss_scale: float) -> Bucket:
        """The memory for an op of this bucket, with what the op before has left."""
        kept = self._kept.pop(key, None)
        if kept is None or kept.values.size != length:
            kept = _Residue(np.zeros(length, np.float32), loss_scale)
        self._kept[key] = kept
        self._ops += 1
        kept.used = self._ops
        oldest = next(iter(self._kept))
        if self._ops - self._kept[oldest].used > UNUSED_OPS * len(self._kept):
            del self._kept[oldest]
        if loss_scale != kept.loss_scale:
            if loss_scale > 0 and kept.loss_scale > 0:
                kept.values *= np.float32(loss_scale / kept.loss_scale)
            kept.loss_scale = loss_scale
        return kept.values

    def drop(self, key: Hashable) -> None:
        """Nobody has applied the latest op of this bucket. No op of it is in flight."""
        if (kept := self._kept.get(key)) is not None:
            kept.values.fill(0)

    def drop_all(self) -> None:
        """All replicas were made equal, with nothing pending. No op is in flight."""
        for key in self._kept:
            self.drop(key)
