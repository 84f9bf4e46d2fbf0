"""Reads sizes as people write them: 4096, 64K, 25M."""

from __future__ import annotations

import argparse

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_bytes(text: str) -> int:
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in _UNITS else (text, "")
    try:
        return int(digits) * _UNITS.get(unit, 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 64K or 25M") from None
