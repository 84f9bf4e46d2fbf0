"""The two halves of a process group: Gloo for what must be exact, a tailcut group for what may be bounded.

Owns the decision which half an op goes to. It depends only on what all ranks see alike, because each half
matches its ops by their order. Holds what the two adapter classes for torch share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from tailcut import notices
from tailcut.config import Config
from tailcut.group import Group
from tailcut.pytorch.reducer import Future, Reducer, Reduction
from tailcut.pytorch.staging import DTYPES
from tailcut.stats import Stats

RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
"""The major and minor version of torch."""

COLLECTIVES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "allreduce_sparse",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "set_timeout",
)
"""Everything that goes to Gloo, under each name that some release of torch has for it. What is left to the
base class ProcessGroup calls C++ with the GIL held, and the threads of Gloo then hang."""


TELLING_SUMS = 10
"""After so many exact sums and no bounded reduction it is time to say so: DDP has done some steps."""


class BoundedWork(Work):
    """One bounded reduction, as torch.distributed wants to see it."""

    def __init__(self, reduction: Reduction) -> None:
        super().__init__()
        self._reduction = reduction

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return by the deadline of the op, whatever the timeout of the process group is."""
        self._reduction.future.wait()
        return True

    def get_future(self) -> Future:
        return self._reduction.future

    def is_completed(self) -> bool:
        return self._reduction.future.done()

    def is_success(self) -> bool:
        return self.is_completed() and self._reduction.error is None

    def exception(self) -> Exception | None:
        return self._reduction.error

    def result(self) -> list[torch.Tensor]:
        return [self._reduction.tensor]

    def synchronize(self) -> None:
        self.wait()


class Bounded:
    """The half that goes through tailcut."""

    def __init__(self, group: Group, farewell: Callable[[], None] | None = None) -> None:
        self._reducer = Reducer(group, farewell=farewell)
        self._bounds_something = False
        self._opted_in = replace(group.config, bound_sums=True)
        self._exact_sums = 0  # of tensors that this would bound
        self._opened_at = notices.users_place()
        # torch before 2.7 drops works that are still in use. Later ones do not, and works would keep tensors.
        self._recent: deque[BoundedWork] = deque(maxlen=64 if RELEASE < (2, 7) else 0)

    @property
    def group(self) -> Group:
        return self._reducer.group

    def stats(self) -> Stats:
        return self._reducer.stats()

    def reduce(self, tensors: list[torch.Tensor], reduce_op: Any) -> BoundedWork | None:
        """Start the reduction and return it; None if it is one for Gloo."""
        if len(tensors) != 1 or not is_bounded(tensors[0], reduce_op, self.group.config):
            self._note_unbounded(tensors, reduce_op)
            return None
        self._bounds_something = True
        scale = self.group.world_size if reduce_op == dist.ReduceOp.SUM else 1
        work = BoundedWork(self._reducer.average(tensors[0], scale=scale))
        self._recent.append(work)
        return work

    def close(self, linger_s: float | None = None) -> None:
        self._reducer.close(linger_s)

    def _note_unbounded(self, tensors: list[torch.Tensor], reduce_op: Any) -> None:
        """Rank 0 warns once if all it is given are sums, as DDP takes them: then nothing is bounded."""
        if self._bounds_something or self._exact_sums == TELLING_SUMS:
            return
        self._exact_sums += all(is_bounded(tensor, reduce_op, self._opted_in) for tensor in tensors)
        if self._exact_sums == TELLING_SUMS and self.group.rank == 0:
            notices.warn(
                f"tailcut: {TELLING_SUMS} sums of large tensors went through Gloo and nothing was bounded: "
                "DDP sums its gradients, and a rank that stops still stops all; use tailcut.attach(ddp), or "
                "Config(bound_sums=True) or TAILCUT_BOUND_SUMS=1 if this process group sums gradients only",
                self._opened_at,
            )


def is_bounded(tensor: torch.Tensor, reduce_op: Any, config: Config) -> bool:
    """Means of large floating-point tensors are bounded, and sums of them if the group opts in."""
    if reduce_op != dist.ReduceOp.AVG and not (config.bound_sums and reduce_op == dist.ReduceOp.SUM):
        return False
    large = tensor.numel() * tensor.element_size() >= config.bound_from_bytes
    return large and tensor.dtype in DTYPES and tensor.layout == torch.strided


def delegate(adapter: type, names: Iterable[str], inner: str, original: type) -> None:
    """Give ``adapter`` methods that call those of its attribute ``inner``, as far as this torch has them."""

    def calling(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(getattr(self, inner), name)(*args, **kwargs)

        call.__name__ = name
        return call

    for name in names:
        if hasattr(original, name):
            setattr(adapter, name, calling(name))
