"""A vector as packets that can be cut at any byte, and back (docs/codec.md).

Owns the public checks. The codec itself is in native/codec.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tailcut import _native
from tailcut.errors import ConfigError

__all__ = ["decode", "encode"]

CODEC_IDS = {"planes": _native.CODEC_PLANES, "raw": _native.CODEC_RAW}
_FRAME_BYTES = 14 + 28
"""Ethernet, IPv4 and UDP headers, which a switch that trims keeps as well."""
_MAX_DATAGRAM_BYTES = 65507
_MAX_COORDINATES = 2**32 - 1


def encode(
    x: npt.ArrayLike,
    *,
    codec: str = "planes",
    planes: int = 16,
    seed: int = 0,
    packet_bytes: int = 1472,
    trim_bytes: int = 256,
) -> list[bytes]:
    """The packets of a vector. Each has at most ``packet_bytes``, with its header.

    ``planes`` is the number of bits of a coordinate, 1 to 16: fewer are smaller and coarser. The codec "raw"
    is exact fp32 instead. The rotation derives from ``seed``: with different seeds the errors of vectors are
    independent. ``trim_bytes`` is the shortest frame that a switch leaves of a packet; a packet then has so
    few coordinates that the frame holds their first plane. 0 says that this is not known.
    """
    if codec not in CODEC_IDS:
        raise ConfigError(f"codec={codec!r} is unknown; take one of {', '.join(map(repr, CODEC_IDS))}")
    if not 1 <= planes <= 16:
        raise ConfigError(f"planes={planes} must be between 1 and 16 bits a coordinate")
    if packet_bytes > _MAX_DATAGRAM_BYTES:
        raise ConfigError(f"packet_bytes={packet_bytes} exceeds {_MAX_DATAGRAM_BYTES}, the largest datagram")
    trimmed_bytes = trimmed_payload_bytes(trim_bytes)
    if codec == "planes" and trim_bytes and trimmed_bytes < 8:
        least = _FRAME_BYTES + _native.HEADER_BYTES + 8
        raise ConfigError(
            f"trim_bytes={trim_bytes} leaves no payload in a trimmed frame; {least} is the least"
        )
    spec = (CODEC_IDS[codec], planes)
    limits = (max(packet_bytes - _native.HEADER_BYTES, 0), max(trimmed_bytes, 0))
    if _native.codec_packet_granules(*spec, *limits) == 0:
        raise ConfigError(
            f"packet_bytes={packet_bytes} does not hold {_native.GRANULE} coordinates; "
            "raise it" + (" or lower planes" if codec == "planes" else "")
        )
    message = _native.Message()
    message.encode(_vector(x), *spec, _seed(seed), *limits)
    return message.packets()


def decode(
    packets: Iterable[bytes | None], n: int, *, seed: int = 0, biased: bool = False
) -> npt.NDArray[np.float32]:
    """The vector of ``n`` coordinates that was given to ``encode`` with the same seed, as far as it came.

    Packets may come in any order and may be cut at any byte. None stands for a lost packet. Packets of others
    are left out. Planes are unbiased over seeds in every block from which anything came; ``biased`` gives the
    least squared error instead. With raw, coordinates that did not come are zero.
    """
    if not 0 <= n <= _MAX_COORDINATES:
        raise ConfigError(f"n={n} must be between 0 and {_MAX_COORDINATES} coordinates")
    out = np.empty(n, np.float32)
    given = [packet if packet is None else bytes(packet) for packet in packets]
    _native.codec_decode(given, _seed(seed), biased, out)
    return out


def trimmed_payload_bytes(trim_bytes: int) -> int:
    """What is left of a payload when a switch trims its frame to ``trim_bytes``. 0: not known."""
    return trim_bytes - _FRAME_BYTES - _native.HEADER_BYTES if trim_bytes else 0


def _vector(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    array = np.asarray(x)
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise ConfigError(
            f"x must be one vector of numbers, not an array of {array.dtype} with shape {array.shape}; "
            "flatten it, or encode its parts"
        )
    if array.size > _MAX_COORDINATES:
        raise ConfigError(f"x has {array.size} coordinates; {_MAX_COORDINATES} is the most")
    return np.ascontiguousarray(array, np.float32)


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed={seed} must be an integer of 64 bits, not negative")
    return seed
