"""The rotation of docs/codec.md in NumPy and 64-bit floating point: what the native one is held to."""

from __future__ import annotations

import math

import numpy as np

MASK = 2**64 - 1


def mix(x: int) -> int:
    """splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def block_key(seed: int, seq: int, shard: int, block: int) -> int:
    return mix(mix(mix(seed) ^ (shard << 32 | seq)) ^ block)


def mixes(x: np.ndarray) -> np.ndarray:
    """``mix`` of every one; unsigned integers wrap around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def signs_of(key: int, length: int) -> np.ndarray:
    words = mixes(np.uint64(key) + np.arange(length // 64, dtype=np.uint64))
    bits = words[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)
    return 1.0 - 2.0 * bits.reshape(-1).astype(np.float64)


def hadamard(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64).copy()
    h = 1
    while h < x.size:
        x = x.reshape(-1, 2, h)
        x = np.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], axis=1).reshape(-1)
        h *= 2
    return x / math.sqrt(x.size)


def rotate(x: np.ndarray, key: int) -> np.ndarray:
    return hadamard(signs_of(key, x.size) * x)


def rotate_back(z: np.ndarray, key: int) -> np.ndarray:
    return signs_of(key, z.size) * hadamard(z)
