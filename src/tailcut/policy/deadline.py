"""How the deadline of an op is divided between its stages."""

from __future__ import annotations

from dataclasses import dataclass

SCATTER_SHARE = 0.5
"""t_B as a share of the deadline: SCATTER and GATHER move the same bytes, so each gets half."""

SCATTER_CAP_SHARE = 0.75
"""The cap from the first arrival: the rank that entered first still has a quarter left for its GATHER."""


@dataclass(frozen=True)
class StageBounds:
    """Bounds of one op, in seconds: see rule 1 in docs/architecture.md."""

    scatter_s: float
    scatter_cap_s: float
    deadline_s: float


def fixed_bounds(deadline_s: float) -> StageBounds:
    return StageBounds(SCATTER_SHARE * deadline_s, SCATTER_CAP_SHARE * deadline_s, deadline_s)
