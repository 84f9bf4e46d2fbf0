"""Tells the other ranks that this one enters no op for a while, because it evaluates: nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tailcut.engine.ops import Ops
from tailcut.pytorch.passes import Passes


class Absence:
    """One rank. It is a forward pre-hook of the model inside DDP, which most programs evaluate."""

    def __init__(self, ops: Ops, passes: Passes) -> None:
        self._ops = ops
        self._passes = passes
        self._away = False

    def __call__(self, model: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if not model.training and not torch.is_grad_enabled():
            self._evaluate()

    # Under torch.compile, counts that change with every pass would make it compile anew.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _evaluate(self) -> None:
        if self._passes.forwards == 0:  # else it is a part of a step, and backward is near
            self._set(True)

    def end(self) -> None:
        """A forward pass of training begins."""
        self._set(False)

    @contextmanager
    def lasting(self) -> Iterator[None]:
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    def _set(self, away: bool) -> None:
        if away != self._away:
            self._away = away
            self._ops.set_away(away)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model tells nobody anything, and a saved one is loaded where there is no tailcut."""
        return getattr, (nullcontext(), "__exit__")
