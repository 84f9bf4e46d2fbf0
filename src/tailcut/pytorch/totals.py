"""The mean of one number over the ranks, by the deadline: for counts and losses that frameworks gather.

A group of its own, so that it may be used once a step or once in many. A rank that is behind takes no part in
what is over.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from tailcut.config import Config
from tailcut.pytorch.startup import attachment_name, open_group, store_of

SHARE = 0.25
"""Of the deadline, for one number: a step has up to three, and ends within two deadlines."""


class BoundedMean:
    """Over the ranks of a process group. Numbers travel as they are, because they bear no noise."""

    def __init__(self, process_group: dist.ProcessGroup, config: Config) -> None:
        exact = replace(
            config,
            deadline_s=SHARE * config.deadline_s,
            codec="raw",
            planes=0,
            rows=1,
            lanes=1,
            ledger="",
            replay="",
            pool_bytes=1 << 20,
        )
        name = attachment_name(process_group)
        self._group = open_group(
            store_of(process_group), name, process_group.rank(), process_group.size(), exact
        )

    def of(self, own: float) -> float:
        """The mean of what all ranks pass, or of those that were in time; ``own`` if nobody else was."""
        for _ in range(self._group.behind_ops - 1):  # the others may have entered this one first
            self._group.allreduce(np.zeros(1, np.float32), contribute=False).wait()
        value = np.array([own], np.float32)
        report = self._group.allreduce(value).wait()
        if report.status == "behind":
            self._group.resynced()
            return own
        return own if report.lost_frac else float(value[0])

    def close(self) -> None:
        self._group.close()
