"""``tailcut bench codec``: what it costs to rotate, encode and decode a coordinate, in multiples of memcpy.

Owns one run: its options and its result. codec_table.py prints it. The kernels have no public names, so this
benchmark uses the native module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from tailcut import _native
from tailcut.codec import trimmed_payload_bytes
from tailcut.errors import ConfigError

DEFAULT_SIZE_BYTES = 105 << 20
"""More than the caches hold."""

PLANES = (16, 8, 4, 1)

SEED = 1


@dataclass(frozen=True, kw_only=True)
class CodecOptions:
    """One run."""

    size_bytes: int = DEFAULT_SIZE_BYTES
    rounds: int = 9
    """How often everything is measured. The best time counts."""
    packet_bytes: int = 1472
    trim_bytes: int = 256

    def __post_init__(self) -> None:
        if self.size_bytes < 4 * _native.CODEC_BLOCK:
            raise ConfigError(
                f"size {self.size_bytes} must be a block at least, {4 * _native.CODEC_BLOCK} bytes"
            )
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds} is too few: 1 is the least")

    @property
    def count(self) -> int:
        """The number of coordinates, in whole blocks."""
        return self.size_bytes // 4 // _native.CODEC_BLOCK * _native.CODEC_BLOCK


@dataclass(frozen=True)
class Step:
    """One step of the codec on all coordinates. Its time is the best of all rounds."""

    name: str
    planes: int | None
    ns: float
    """The time for one coordinate."""
    memcpy_multiple: float
    nmse: float | None = None
    bytes_per_coordinate: float | None = None


def run_codec(options: CodecOptions) -> Iterator[Step]:
    """Measure, and yield memcpy, the rotation, then encode and decode for each number of planes."""
    count = options.count
    x = np.random.default_rng(SEED).standard_normal(count, dtype=np.float32)
    out = np.zeros_like(x)
    copy_s = _best(options, lambda: np.copyto(out, x))
    yield Step("memcpy", None, 1e9 * copy_s / count, 1.0)

    def step(name: str, planes: int | None, work: Callable[[], object], **figures: float) -> Step:
        """Measure a step next to a memcpy of its own, because a noisy machine is slow at both."""
        own_copy_s, work_s = float("inf"), float("inf")
        for _ in range(options.rounds):
            own_copy_s = min(own_copy_s, _elapsed_s(lambda: np.copyto(out, x)))
            work_s = min(work_s, _elapsed_s(work))
        return Step(name, planes, 1e9 * work_s / count, work_s / own_copy_s, **figures)

    yield step("rotate", None, lambda: _native.codec_rotate_all(x, out))
    message = _native.Message()
    limits = (options.packet_bytes - _native.HEADER_BYTES, trimmed_payload_bytes(options.trim_bytes))
    for planes in PLANES:
        encode = partial(message.encode, x, _native.CODEC_PLANES, planes, SEED, *limits)
        coded = step("encode", planes, encode)
        decoded = step("decode", planes, lambda: message.decode(SEED, False, out))
        message.decode(SEED, False, out)
        size = message.size_bytes / count
        error = float(np.square(out - x, dtype=np.float64).sum() / np.square(x, dtype=np.float64).sum())
        for one in (coded, decoded):
            yield Step(one.name, planes, one.ns, one.memcpy_multiple, error, size)


def _best(options: CodecOptions, work: Callable[[], object]) -> float:
    return min(_elapsed_s(work) for _ in range(options.rounds))


def _elapsed_s(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
