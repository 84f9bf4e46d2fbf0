"""torchft: a process group for its Manager whose reductions end by their deadline. Written for torchft 0.2.

torchft makes a new group for every quorum. Each is a new tailcut group with an inner Gloo.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from torchft.process_group import ProcessGroupWrapper

from tailcut.config import Config, configured
from tailcut.pytorch.creation import bounded_part, create
from tailcut.stats import Stats


class Options(NamedTuple):
    """What torch tells a backend of the process group that it is to make."""

    store: Any
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]


class ProcessGroupTailcut(ProcessGroupWrapper):
    """``Manager(pg=ProcessGroupTailcut(deadline_s=5), ...)``. It is given sums, so sums are bounded."""

    def __init__(
        self, config: Config | None = None, timeout: timedelta = timedelta(seconds=60), **settings: Any
    ) -> None:
        super().__init__(timeout)
        self._config = replace(configured(config, settings), bound_sums=True)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        quorum = f"torchft/{self._quorum_id}/{self._group_rank}"
        options = Options(store, rank, world_size, self._timeout, quorum, [])
        return create(options, self._config)

    def shutdown(self) -> None:
        self.abort(errored=False)

    def stats(self) -> Stats:
        """What the group of this quorum has cost so far."""
        return bounded_part(self._pg).stats()

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        return "torchft-tailcut"
