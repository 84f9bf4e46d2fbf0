"""Brings a block of a replica to where its owner's is, from copies that both made some steps ago.

The difference of the copies is added rather than the owner's copy written, because steps have passed. Knows
nothing of how the copies came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tailcut.pytorch.blocks import Block, Segment, segments


class Correction(NamedTuple):
    """What is to be added to a block."""

    block: Block
    step: int
    """When the copies were made: in this backward pass."""
    own: Sequence[Segment]
    owners: Sequence[torch.Tensor]
    """The owner's values, segment by segment."""


def apply(correction: Correction, optimizer: torch.optim.Optimizer | None, steps: int) -> bool:
    """Correct a block whose copies are this many optimizer steps old. False if the state has another form
    now, or if the owner's has an Inf or a NaN."""
    now = segments(correction.block, optimizer)
    if not all(bool(values.isfinite().all()) for values in correction.owners):
        return False
    if [(s.name, len(s.values)) for s in now] != [(s.name, len(s.values)) for s in correction.own]:
        return False
    for target, own, owners in zip(now, correction.own, correction.owners, strict=True):
        kept = _decay(target.name, _group_of(target.parameter, optimizer)) ** steps
        _add(target, own.values, owners, kept)
    return True


def _add(target: Segment, own: torch.Tensor, owners: torch.Tensor, kept: float) -> None:
    """In float64, in which the difference of two float32 is exact: without steps in between, the result is
    the owner's values bit for bit."""
    values = target.values.double()
    difference = (owners.double() - own.double()).to(values.device)
    corrected = values + kept * difference
    if target.name and min(values.min(), own.min(), owners.min()) >= 0:
        # Squares stay positive: Adam divides by their root.
        corrected = corrected.maximum(values.minimum(owners.double().to(values.device)))
    target.values.copy_(corrected)


def _decay(name: str, group: dict[str, Any]) -> float:
    """What is left of a difference in this state one step later. Other steps add the same on all ranks."""
    if name == "momentum_buffer" and "momentum" in group:
        return float(group["momentum"])
    if name == "exp_avg" and "betas" in group:
        return float(group["betas"][0])
    if name == "exp_avg_sq" and "betas" in group:
        return float(group["betas"][1])
    if name == "square_avg" and "alpha" in group:
        return float(group["alpha"])
    return 1.0


def _group_of(parameter: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    for group in optimizer.param_groups if optimizer else ():
        if any(other is parameter for other in group["params"]):
            return group
    return {}
