"""Reads the structs of an op's record by the schema that stands at the head of every ledger.

So a ledger of an older or newer build is read as far as names are the same. Knows nothing of files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tailcut.ledger.frames import read_varint

_FLOAT = struct.Struct("<f")

Fields = dict[str, Any]
Structs = Mapping[str, Sequence[Sequence[str]]]


def unzigzag(value: int) -> int:
    """Small numbers of either sign were made small numbers."""
    return value >> 1 ^ -(value & 1)


class Bytes:
    """A record that is being read."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def number(self) -> int:
        value, self.at = read_varint(self.content, self.at)
        return value

    def signed(self) -> int:
        return unzigzag(self.number())

    def time_s(self) -> float:
        return self.signed() / 1e6

    def real(self) -> float:
        (value,) = _FLOAT.unpack_from(self.content, self.at)
        self.at += _FLOAT.size
        return float(value)

    def take(self, count: int) -> bytes:
        taken = self.content[self.at : self.at + count]
        if len(taken) < count:
            raise IndexError("the record ends before its last field")
        self.at += count
        return taken


Read = Callable[[Bytes, Any], Any]
"""Reads a value; takes what it is if it is not written."""


class Schema:
    """The structs of one ledger, by name."""

    def __init__(self, structs: Structs) -> None:
        self._structs = structs
        self._readers: dict[str, list[tuple[str, Read]]] = {
            name: [(field, self._reader(kind)) for field, kind in fields] for name, fields in structs.items()
        }
        self._zeros: dict[str, Fields] = {name: self._zero(name) for name in structs}

    def read(self, name: str, source: Bytes) -> Fields:
        """The struct that begins there, as its fields by name."""
        return self._fields(name, source, self._zeros[name])

    def _fields(self, name: str, source: Bytes, base: Fields) -> Fields:
        readers = self._readers[name]
        bits = int.from_bytes(source.take((len(readers) + 7) // 8), "little")
        values = dict(base)
        while bits:
            index = (bits & -bits).bit_length() - 1
            bits &= bits - 1
            field, reader = readers[index]
            values[field] = reader(source, base[field])
        return values

    def _reader(self, kind: str) -> Read:
        if kind.startswith("list of "):
            return self._list_reader(kind.removeprefix("list of "))
        if "|" in kind:
            names = kind.split("|")
            return lambda source, _: names[source.number()]
        if kind in self._structs:
            return lambda source, base: self._fields(kind, source, base)
        return _SCALARS[kind][0]

    def _list_reader(self, kind: str) -> Read:
        if kind not in self._structs:
            read_entry = self._reader(kind)
            return lambda source, _: [read_entry(source, None) for _ in range(source.number())]

        def read_structs(source: Bytes, _: Any) -> list[Fields]:
            entries: list[Fields] = []
            for _index in range(source.number()):  # each tells only what the one before does not
                entries.append(self._fields(kind, source, entries[-1] if entries else self._zeros[kind]))
            return entries

        return read_structs

    def _zero(self, name: str) -> Fields:
        return {field: self._zero_of(kind) for field, kind in self._structs[name]}

    def _zero_of(self, kind: str) -> Any:
        if kind.startswith("list of "):
            return []
        if "|" in kind:
            return kind.split("|")[0]
        return self._zero(kind) if kind in self._structs else _SCALARS[kind][1]


def _number_or_none(source: Bytes, _: Any) -> int | None:
    value = source.number()
    return value - 1 if value else None


def _time_or_none(source: Bytes) -> float | None:
    value = source.number()
    return unzigzag(value - 1) / 1e6 if value else None


_SCALARS: dict[str, tuple[Read, Any]] = {
    "number": (lambda source, _: source.number(), 0),
    "signed": (lambda source, _: source.signed(), 0),
    "time": (lambda source, _: source.time_s(), 0.0),
    "time or none": (lambda source, _: _time_or_none(source), None),
    "number or none": (_number_or_none, None),
    "float": (lambda source, _: source.real(), 0.0),
    "flag": (lambda source, base: not base, False),
}
