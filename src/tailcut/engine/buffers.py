"""The caller's memory as a flat float32 bucket: arrays, buffers, tensors in host memory. Copies nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tailcut.errors import ConfigError

Bucket = npt.NDArray[np.float32]

_CPU = 1
"""kDLCPU of DLPack."""


def bucket_of(source: object) -> Bucket:
    """A flat view. What is written to it is written to ``source``, which it keeps alive."""
    array = _view_of(source)
    if array.dtype != np.float32:
        raise ConfigError(f"allreduce takes float32, not {array.dtype}; convert it first")
    if not array.flags.c_contiguous:
        raise ConfigError("allreduce works in place on contiguous memory; pass a contiguous copy")
    if not array.flags.writeable:
        raise ConfigError("allreduce works in place, and this memory is read-only; pass a copy")
    if array.size >= 1 << 32:
        raise ConfigError(f"{array.size} coordinates exceed the limit of 2**32 - 1 for one op; split them")
    return array.reshape(-1)


def _view_of(source: Any) -> npt.NDArray[Any]:
    if isinstance(source, np.ndarray):
        return source
    if hasattr(source, "detach"):
        return _view_of_tensor(source)
    if hasattr(source, "__dlpack_device__") and source.__dlpack_device__()[0] != _CPU:
        raise ConfigError(_elsewhere(type(source).__name__, "a device"))
    if hasattr(source, "__array_interface__"):
        return np.asarray(source)
    try:
        return np.asarray(memoryview(source))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"allreduce takes float32 in host memory (a NumPy array, array.array('f'), memoryview or CPU "
            f"tensor), not {type(source).__name__}: {error}"
        ) from None


def _view_of_tensor(tensor: Any) -> npt.NDArray[Any]:
    """A tensor of torch is known by its methods: this package does not import torch for it."""
    if tensor.device.type != "cpu":
        raise ConfigError(_elsewhere("tensor", str(tensor.device)))
    if not str(tensor.dtype).endswith(".float32"):
        raise ConfigError(f"allreduce takes float32, not {tensor.dtype}; convert it with .float()")
    try:
        return np.asarray(tensor.detach().numpy())
    except (TypeError, RuntimeError) as error:  # sparse, or a lazy view
        raise ConfigError(f"allreduce works in place, and this tensor has no plain memory: {error}") from None


def _elsewhere(what: str, where: str) -> str:
    return (
        f"allreduce works in host memory, and this {what} is on {where}: copy it to the host, or use "
        "tailcut.attach or the backend 'tailcut', which do that"
    )
