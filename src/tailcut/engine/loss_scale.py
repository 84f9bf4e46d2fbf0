"""How the loss scale of an op travels: as the upper half of its fp32 bits."""

from __future__ import annotations

import struct

from tailcut.errors import ConfigError

_LARGEST = 3.4028234e38
"""Of fp32."""


def tag_of(loss_scale: float) -> int:
    """The tag of a loss scale; 0 if there is none. Scales that are powers of two are exact."""
    if not 0 <= loss_scale <= _LARGEST:
        raise ConfigError(f"loss_scale={loss_scale} must be a positive float32, or 0 for none")
    bits: int = struct.unpack("<I", struct.pack("<f", loss_scale))[0]
    return bits >> 16
