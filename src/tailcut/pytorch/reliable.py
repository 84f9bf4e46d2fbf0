"""Which coordinates of gradient buckets are reliable: those of the parameters that ``Config.reliable`` names.

Knows the order of the parameters in a bucket, and nothing of blocks or of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from tailcut.engine.ops import Run


class ReliableParameters:
    """The parameters of one model whose names match one of the patterns."""

    def __init__(self, names: Mapping[torch.Tensor, str], patterns: Sequence[str]) -> None:
        self.unmatched = [
            pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names.values())
        ]
        self._matching = {
            id(parameter)
            for parameter, name in names.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }
        self._runs: dict[tuple[int, ...], tuple[Run, ...]] = {}  # by the parameters of a bucket

    def runs(self, parameters: Sequence[torch.Tensor]) -> tuple[Run, ...]:
        """The coordinates of the matching ones in a bucket of these parameters."""
        if not self._matching:
            return ()
        layout = tuple(map(id, parameters))
        if layout not in self._runs:
            self._runs[layout] = self._found(parameters)
        return self._runs[layout]

    def _found(self, parameters: Sequence[torch.Tensor]) -> tuple[Run, ...]:
        runs: list[Run] = []
        end = 0
        for parameter in parameters:
            first, end = end, end + parameter.numel()
            if id(parameter) not in self._matching or first == end:
                continue
            if runs and sum(runs[-1]) == first:  # it goes on
                first, _ = runs.pop()
            runs.append((first, end - first))
        return tuple(runs)
