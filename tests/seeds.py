"""Seeds of a test that says more with more of them: few for make test, the rest for make test-long."""

from __future__ import annotations

import pytest


def seeds(few: int, *, of: int) -> list[object]:
    """Parameters 0 to ``of`` - 1. Those from ``few`` on are marked long."""
    return [pytest.param(seed, marks=[pytest.mark.long] if seed >= few else []) for seed in range(of)]
