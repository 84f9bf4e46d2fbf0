"""The backend for torch 2.14 and later: a Python subclass of Backend.

It stands beside the backends of other devices in one process group (``cpu:tailcut,cuda:nccl``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, Backend
from torch.distributed import ProcessGroupGloo

from tailcut.pytorch.bounded import COLLECTIVES, Bounded, delegate
from tailcut.pytorch.means import IntegerMean, is_mean_of_integers

_alive: set[TailcutBackend] = set()
"""torch keeps only the C++ half of a backend alive."""


class TailcutBackend(Backend):
    """Bounded reductions go to tailcut, everything else to Gloo."""

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    _supports_time_estimate = False

    def __init__(self, store: Any, rank: int, size: int, gloo: Any, bounded: Bounded, options: Any) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._bounded = bounded
        self._options = Backend.Options("tailcut", timeout=options.timeout)
        self._options.global_ranks_in_group = options.global_ranks_in_group
        self._options.group_name = options.group_id
        _alive.add(self)

    @property
    def options(self) -> Any:
        return self._options

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        bounded = self._bounded.reduce(tensors, opts.reduceOp)
        if bounded is not None:
            return bounded
        if is_mean_of_integers(tensors, opts.reduceOp):
            return IntegerMean(self._gloo.allreduce(tensors, AllreduceOptions()), tensors, self.size())
        return self._gloo.allreduce(tensors, opts)

    def shutdown(self) -> None:
        self._bounded.close()
        self._gloo.shutdown()
        _alive.discard(self)

    def abort(self) -> None:
        self._bounded.close(linger_s=0.0)
        self._gloo.abort()
        _alive.discard(self)

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        return "tailcut"


delegate(TailcutBackend, COLLECTIVES, "_gloo", ProcessGroupGloo)
