"""The mean of integers over Gloo, which only sums them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work


def is_mean_of_integers(tensors: list[torch.Tensor], reduce_op: Any) -> bool:
    return reduce_op == dist.ReduceOp.AVG and not any(
        t.is_floating_point() or t.is_complex() for t in tensors
    )


class IntegerMean(Work):
    """A sum on its way, which is divided when it has come. What the division leaves over is dropped, as NCCL
    and Lightning do."""

    def __init__(self, total: Any, tensors: list[torch.Tensor], ranks: int) -> None:
        super().__init__()
        self._tensors = tensors
        self._ranks = ranks
        # A continuation runs once, before anybody who waits for it goes on.
        self._future: torch.futures.Future[Any] = total.get_future().then(self._divide)

    def _divide(self, total: torch.futures.Future[Any]) -> list[torch.Tensor]:
        total.value()  # raises what went wrong
        for tensor in self._tensors:
            tensor.copy_(torch.div(tensor, self._ranks, rounding_mode="trunc"))
        return self._tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        try:
            self._future.value()
        except Exception as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()
