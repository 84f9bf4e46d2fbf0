"""The frames of a ledger: each record with a marker, a checksum and its number (docs/ledger.md).

Knows nothing of what records say. Reading survives any damage: what is whole is found again behind it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

MARKER = b"\xc7\x1e"
_CRC = struct.Struct("<I")
_HEAD_BYTES = len(MARKER) + _CRC.size

MOST_BYTES = 1 << 28
"""No record is longer, so that a flipped bit in a length does not send a reader far."""


class Frame(NamedTuple):
    """One record as the file has it."""

    kind: int
    number: int
    """Counted from 0 on in every file."""
    payload: bytes
    at: int
    """The byte of the file at which it begins."""


class Damage(NamedTuple):
    """Bytes that are no whole record."""

    at: int
    size_bytes: int
    records: int | None
    """How many records are lost there; None at the end of a file, where nobody knows."""

    def __str__(self) -> str:
        if self.records is None:
            return f"the last {self.size_bytes} bytes, from byte {self.at} on, are no whole record"
        lost = "nothing is missing" if self.records == 0 else f"{self.records} of the records are lost"
        return f"{self.size_bytes} bytes from byte {self.at} on are damaged: {lost}"


def framed(kind: int, number: int, payload: bytes) -> bytes:
    """The bytes of one record."""
    body = bytes([kind]) + varint(number) + varint(len(payload)) + payload
    return MARKER + _CRC.pack(zlib.crc32(body)) + body


def read(content: bytes) -> Iterator[Frame | Damage]:
    """All whole records, in order, and what lies between them."""
    at = lost_from = 0
    number = -1
    while at < len(content):
        frame = _frame_at(content, at)
        if frame is None or frame[0].number <= number:
            at = content.find(MARKER, at + 1)
            if at < 0:
                break
            continue
        found, end = frame
        if at > lost_from:
            yield Damage(lost_from, at - lost_from, found.number - number - 1)
        yield found
        at = lost_from = end
        number = found.number
    if lost_from < len(content):
        yield Damage(lost_from, len(content) - lost_from, None)


def read_ring(content: bytes) -> list[Frame]:
    """All whole records of a ring, in the order in which they were written. The latest may lie before older
    ones, and may have been written over half of one."""
    frames, at = [], content.find(MARKER)
    while at >= 0:
        found = _frame_at(content, at)
        if found is not None:
            frames.append(found[0])
        at = content.find(MARKER, found[1] if found else at + 1)
    return sorted(frames, key=lambda frame: frame.number)


def _frame_at(content: bytes, at: int) -> tuple[Frame, int] | None:
    """The record that begins there and where it ends; None if there is none, or not all of it."""
    if content[at : at + len(MARKER)] != MARKER:
        return None
    body = at + _HEAD_BYTES
    try:
        number, begin = read_varint(content, body + 1)
        length, begin = read_varint(content, begin)
    except IndexError:
        return None
    end = begin + length
    if length > MOST_BYTES or end > len(content):
        return None
    (stated,) = _CRC.unpack_from(content, at + len(MARKER))
    if zlib.crc32(memoryview(content)[body:end]) != stated:
        return None
    return Frame(content[body], number, content[begin:end], at), end


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all bytes but the last have the highest bit set."""
    text = bytearray()
    while value >= 0x80:
        text.append(value & 0x7F | 0x80)
        value >>= 7
    text.append(value)
    return bytes(text)


def read_varint(content: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends. Raises IndexError at the end of the content."""
    value = shift = 0
    while (byte := content[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1
