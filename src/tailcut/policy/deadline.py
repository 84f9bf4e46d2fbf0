"""How the deadline of an op is divided between its stages."""

from __future__ import annotations

from tailcut import _native

SCATTER_SHARE = 0.5
"""t_B as a share of the deadline: SCATTER and GATHER move the same bytes, so each gets half."""

SCATTER_CAP_SHARE = 0.75
"""The cap from the first arrival: the rank that entered first still has a quarter left for its GATHER."""


def fixed_bounds(deadline_s: float) -> _native.Bounds:
    deadline_ns = round(1e9 * deadline_s)
    return _native.Bounds(
        scatter_ns=round(SCATTER_SHARE * deadline_ns),
        scatter_cap_ns=round(SCATTER_CAP_SHARE * deadline_ns),
        gather_ns=deadline_ns,
        scatter_grace_ns=deadline_ns,
        gather_grace_ns=deadline_ns,
        deadline_ns=deadline_ns,
    )
