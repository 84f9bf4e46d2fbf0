"""The backend for torch 2.4 to 2.13: a Python subclass of ProcessGroup that replaces the whole group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup, ProcessGroupGloo

from tailcut.pytorch.bounded import COLLECTIVES, Bounded, delegate
from tailcut.pytorch.means import IntegerMean, is_mean_of_integers

STATE = (
    "_end_coalescing",
    "_get_backend",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_start_coalescing",
)


class TailcutProcessGroup(ProcessGroup):
    """Bounded reductions go to tailcut, everything else to a process group of Gloo."""

    def __init__(
        self, store: Any, rank: int, size: int, gloo: ProcessGroupGloo, bounded: Bounded, options: Any
    ) -> None:
        try:
            super().__init__(store, rank, size)
        except TypeError:  # older torch
            super().__init__(rank, size)  # type: ignore[call-arg]
        self._bounded = bounded
        self._inner = ProcessGroup(PrefixStore("inner", store), rank, size)
        for group in (self, self._inner):  # in our own group it only provides the name and the device types
            group._set_default_backend(ProcessGroup.BackendType.GLOO)
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, gloo)

    def allreduce(self, tensors: Any, opts: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        listed = [tensors] if torch.is_tensor(tensors) else tensors
        work = self._bounded.reduce(listed, op)
        if work is not None:
            return work
        if is_mean_of_integers(listed, op):
            return IntegerMean(self._inner.allreduce(listed, dist.ReduceOp.SUM), listed, self.size())
        return self._inner.allreduce(tensors, *(() if opts is None else (opts,)), **kwargs)

    def shutdown(self) -> None:
        self._bounded.close()
        self._inner.shutdown()

    def abort(self) -> None:
        self._bounded.close(linger_s=0.0)
        self._inner.abort()

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        return "tailcut"


delegate(TailcutProcessGroup, (*COLLECTIVES, *STATE), "_inner", ProcessGroup)
