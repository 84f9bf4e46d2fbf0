"""HSDP: a rank that stops stops its own replica, and not the others."""

from __future__ import annotations

import pytest

from tests.frameworks.checks import DEADLINE_S, FROZEN_RANK, FROZEN_S, trained


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_a_rank_that_stops_does_not_stop_the_other_replica(way: str) -> None:
    ranks = trained(4, "replicas_hsdp", way).of("frozen")
    longest_s = max(rank["longest_s"] for rank in ranks[2:])  # of the other replica
    print(f"longest step of the other replica: {longest_s:.3f} s")  # pytest -rP shows it
    assert ranks[FROZEN_RANK]["longest_s"] > 0.9 * FROZEN_S
    assert longest_s <= 2 * DEADLINE_S
