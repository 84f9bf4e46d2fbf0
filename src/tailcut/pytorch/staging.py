"""How a tensor's values reach host memory as float32, and how the result goes back.

Owns dtype conversion and the order of streams. Knows nothing of ops. Three threads use a passage in turn:
one calls ``depart`` where the tensor was computed, one ``arrive`` where the op is submitted, one ``go_back``
where it ends.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tailcut.errors import ConfigError

Array = npt.NDArray[np.float32]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that can be averaged: each of their values is also a float32."""


class Passage(Protocol):
    """The way of one tensor to the host and back."""

    immediate: bool
    """Whether ``arrive`` returns at once."""

    def depart(self) -> None:
        """Start to move the values. It does not block."""

    def arrive(self) -> Array:
        """Block until the values are in host memory, and return them. They are averaged in place."""
        ...

    def go_back(self) -> AbstractContextManager[object]:
        """Move the result into the tensor. A future that completes inside the context waits for that."""
        ...


def passage_of(tensor: torch.Tensor) -> Passage:
    """The shortest way for this tensor."""
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise ConfigError(
            f"tailcut averages dense float32, bfloat16 and float16, not {tensor.layout} of {tensor.dtype}"
        )
    if tensor.device.type == "cuda":
        return DevicePassage(tensor, CudaStreams.of(tensor.device))
    if tensor.device.type != "cpu":
        raise ConfigError(f"tailcut averages tensors on cpu and cuda, not on {tensor.device}")
    if tensor.dtype == torch.float32 and tensor.is_contiguous():
        return InPlace(tensor)
    return Converted(tensor)


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        return None


class InPlace:
    """A contiguous float32 tensor in host memory. Nothing is moved."""

    immediate = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def depart(self) -> None:
        return None

    def arrive(self) -> Array:
        return self._tensor.detach().numpy()

    def go_back(self) -> AbstractContextManager[object]:
        return _Nothing()


class Converted:
    """A tensor in host memory with another dtype or layout. A float32 copy is averaged and rounded once."""

    immediate = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._host = torch.empty(tensor.shape, dtype=torch.float32)

    def depart(self) -> None:
        self._host.copy_(self._tensor)

    def arrive(self) -> Array:
        return self._host.numpy()

    def go_back(self) -> AbstractContextManager[object]:
        self._tensor.copy_(self._host)
        return _Nothing()


class Streams(Protocol):
    """What a device must offer: copies that run beside its computation in a known order."""

    def pinned(self, shape: torch.Size) -> torch.Tensor:
        """Float32 host memory that the device copies from and to without blocking."""
        ...

    def copy_out(self, source: torch.Tensor, host: torch.Tensor) -> Any:
        """Copy when the current stream has done its work so far. Returns an event with ``synchronize``."""
        ...

    def copy_in(self, host: torch.Tensor, target: torch.Tensor) -> AbstractContextManager[object]:
        """Copy on the side stream, which is the current one inside the context."""
        ...


class DevicePassage:
    """A tensor on an accelerator. It is copied to pinned memory and back on a stream of its own."""

    immediate = False

    def __init__(self, tensor: torch.Tensor, streams: Streams) -> None:
        self._tensor = tensor.detach()
        self._streams = streams

    def depart(self) -> None:
        self._host = self._streams.pinned(self._tensor.shape)
        self._copied = self._streams.copy_out(self._tensor, self._host)

    def arrive(self) -> Array:
        self._copied.synchronize()
        return self._host.numpy()

    def go_back(self) -> AbstractContextManager[object]:
        return self._streams.copy_in(self._host, self._tensor)


class CudaStreams:
    """One side stream per CUDA device. torch's pinned allocator keeps memory until its copies are done."""

    _by_device: dict[torch.device, CudaStreams] = {}  # noqa: RUF012, filled as devices are met

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, device: torch.device) -> CudaStreams:
        if device not in cls._by_device:
            cls._by_device[device] = cls(device)
        return cls._by_device[device]

    def pinned(self, shape: torch.Size) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, pin_memory=True)

    def copy_out(self, source: torch.Tensor, host: torch.Tensor) -> torch.cuda.Event:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            # A copy to the host that converts would block, so the device converts first.
            host.copy_(source.to(torch.float32), non_blocking=True)
            source.record_stream(self._side)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._side)
        return event

    def copy_in(self, host: torch.Tensor, target: torch.Tensor) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._side)
        with context:
            target.copy_(host.to(self._device, non_blocking=True))
            target.record_stream(self._side)
        return torch.cuda.stream(self._side)
