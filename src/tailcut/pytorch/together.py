"""Several optimizers of one model as one: their groups and states in a row, and a step of all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from tailcut.errors import ConfigError
from tailcut.pytorch.unwrapping import optimizer_of


class Together:
    """Reads and changes the optimizers in place. A step of it is one of each."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.state = _States(optimizers)
        self._unstepped = set(map(id, optimizers))
        self._hooks: list[Callable[..., None]] = []
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_step)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def register_step_post_hook(self, hook: Callable[..., None]) -> None:
        """``hook`` is called when each of them has stepped since it was called last."""
        self._hooks.append(hook)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._unstepped.discard(id(optimizer))
        if not self._unstepped:
            self._unstepped = set(map(id, self.optimizers))
            for hook in self._hooks:
                hook(self)


class _States:
    """The states of several optimizers by parameter, each of which belongs to one of them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if self._owners.setdefault(parameter, optimizer) is not optimizer:
                        raise ConfigError(
                            "two of the optimizers step the same parameter; give each its own, "
                            "or attach with one of them"
                        )

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        held: dict[str, Any] = self._of(parameter)[parameter]
        return held

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return self._of(parameter).get(parameter, default)

    def _of(self, parameter: torch.Tensor) -> defaultdict[torch.Tensor, Any]:
        # One that was added to an optimizer later is looked up in the first, which has no state of it.
        return self._owners.get(parameter, self._optimizers[0]).state


def each_of(optimizer: Any) -> Sequence[torch.optim.Optimizer]:
    """Those that ``one_of`` made one."""
    if isinstance(optimizer, Together):
        return optimizer.optimizers
    return [optimizer] if optimizer is not None else []


def one_of(optimizers: Any) -> torch.optim.Optimizer | None:
    """What a user passes as ``optimizer=``, as one object: nothing, an optimizer, or several."""
    if optimizers is None:
        return None
    if not isinstance(optimizers, Iterable) or isinstance(optimizers, torch.optim.Optimizer):
        return optimizer_of(optimizers)
    each = [optimizer_of(optimizer) for optimizer in optimizers]
    if len(each) == 1:
        return each[0]
    if not each:
        raise ConfigError("optimizer is an empty list; pass the optimizers of the model, or None")
    return cast(torch.optim.Optimizer, Together(each))
