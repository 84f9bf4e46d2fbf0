"""The records of a ledger: what a file begins with, ops, notes, gaps and the end (docs/ledger.md).

Owns what each says. Knows nothing of files and of damage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

from tailcut import _native
from tailcut.errors import ConfigError
from tailcut.grid import GridLayout
from tailcut.ledger.fates import Fates, read_fates
from tailcut.ledger.frames import varint
from tailcut.ledger.schema import Bytes, Fields, Schema
from tailcut.mirror import LateCompletion, Link, LinkStage, LrScale, StageReport, Traffic, plain
from tailcut.report import Report, Verdict, outcome_of

FORMAT = 2
"""Raised when a reader of the number before would misread a file. New fields do not need it."""

_VERDICTS = tuple(Verdict)


class Kind(IntEnum):
    """What a record is."""

    START = 1
    OP = 2
    NOTE = 3
    GAP = 4
    END = 5
    SERVED = 6
    """What a rank did as an owner in an op that it has not entered."""
    OPEN = 7
    """What it did in an op that has not ended."""


def start_payload(about: Mapping[str, Any]) -> bytes:
    """``about`` is the group and its configuration."""
    return json_payload({"format": FORMAT, **about, "schema": json.loads(_native.record_schema())})


def json_payload(values: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(values), separators=(",", ":")).encode()


def op_head(lane: int, verdicts: Sequence[Verdict]) -> bytes:
    """What an op's record begins with. Ranks that were on time are not named."""
    judged = [
        (place, _VERDICTS.index(verdict))
        for place, verdict in enumerate(verdicts)
        if verdict is not Verdict.ON_TIME
    ]
    return varint(lane) + varint(len(judged)) + b"".join(varint(p) + varint(v) for p, v in judged)


@dataclass(frozen=True)
class Start:
    """What a ledger begins with: the group, its configuration and the layout of its records."""

    about: Mapping[str, Any]

    @classmethod
    def of(cls, payload: bytes) -> Start:
        about = json.loads(payload)
        if about["format"] != FORMAT:
            raise ConfigError(
                f"this ledger has format {about['format']} (tailcut {about.get('tailcut')}), and this build "
                f"reads format {FORMAT}; read it with the version that wrote it"
            )
        return cls(about)

    @property
    def rank(self) -> int:
        return int(self.about["rank"])

    @property
    def ranks(self) -> int:
        return int(self.about["ranks"])

    @cached_property
    def schema(self) -> Schema:
        return Schema(self.about["schema"])

    @cached_property
    def grid(self) -> GridLayout:
        return GridLayout(self.ranks, int(self.about["rows"]))


@dataclass(frozen=True)
class OpRecord:
    """One op as one rank saw it."""

    start: Start
    payload: bytes
    keys: Mapping[int, str]
    """The names of the buckets' keys, by the numbers under which the core knows them."""

    @cached_property
    def _read(self) -> tuple[int, tuple[Verdict, ...], Fields, Fields, Fates]:
        source = Bytes(self.payload)
        lane = source.number()
        judged = {source.number(): _VERDICTS[source.number()] for _ in range(source.number())}
        elapsed_s = source.time_s()
        op = self.start.schema.read("OpReport", source)
        op["ended_at"] = op["entered_at"] + elapsed_s
        terms = self.start.schema.read("Terms", source)
        verdicts = tuple(judged.get(place, Verdict.ON_TIME) for place in range(len(op["links"])))
        return lane, verdicts, op, terms, read_fates(source, op["seq"], op["own_shard"])

    @property
    def rank(self) -> int:
        """Whose record it is."""
        return self.start.rank

    @property
    def lane(self) -> int:
        return self._read[0]

    @property
    def seq(self) -> int:
        return int(self._read[2]["seq"])

    @property
    def entered(self) -> bool:
        """Whether this rank has entered the op. Its engine serves others before."""
        return self.entered_s >= 0

    @property
    def contributed(self) -> bool:
        """Whether this rank sent a contribution, also to an op that it was then too far behind for."""
        return bool(self._read[2]["contributed"])

    @property
    def entered_s(self) -> float:
        """When this rank entered the op, by a clock of its host that starts anywhere."""
        return float(self._read[2]["entered_at"])

    @property
    def ended_s(self) -> float:
        """When the op ended for this rank, by the same clock."""
        return float(self._read[2]["ended_at"])

    @property
    def voided(self) -> bool:
        """The op was given up because its epoch was replaced, and nobody applied it."""
        return bool(self._read[2]["status"] == "void")

    @property
    def own_shard(self) -> int:
        """The shard that this rank owns."""
        return int(self._read[2]["own_shard"])

    def owner(self, shard: int) -> int:
        """The rank that owns a shard; in a grid, of this rank's row."""
        row = self.start.grid.row(self.rank)
        return row[(shard + row.index(self.rank) - self.own_shard) % len(row)]

    @property
    def key(self) -> str | None:
        """The bucket's key as text; None if it had none."""
        number = self.terms["key"]
        return self.keys.get(number, f"{number:08x}") if number else None

    @property
    def terms(self) -> Mapping[str, Any]:
        """What this rank had decided for the op: its bounds, planes, incast and loss scale."""
        return self._read[3]

    @property
    def fates(self) -> Fates:
        return self._read[4]

    def with_fates(self, fates: Fates) -> OpRecord:
        """The same with other fates."""
        changed = replace(self)
        vars(changed)["_read"] = (*self._read[:4], fates)
        return changed

    @property
    def native(self) -> _native.OpReport:
        """As the core reported it, up to that precision."""
        return _native_like(self._read[2])

    @cached_property
    def report(self) -> Report:
        """As ``wait()`` returned it, up to the precision of the ledger: microseconds and single floats."""
        verdicts = self._read[1]
        outcome = outcome_of(self.native, self.start.grid, self.rank, self.key)
        if not isinstance(outcome, Report):
            raise outcome
        return outcome.judged(verdicts) if outcome.status != "behind" else outcome


@dataclass(frozen=True)
class Note:
    """Something that happened beside the ops: an epoch, a skipped step, a resync, a rejoin."""

    event: str
    values: Mapping[str, Any]
    """With ``at_s``, by the same clock as ``OpRecord.entered_s``."""

    @classmethod
    def of(cls, payload: bytes) -> Note:
        values = json.loads(payload)
        return cls(values.pop("event"), values)


@dataclass(frozen=True)
class Gap:
    """Records that were not written because the disk was slow or full."""

    records: int
    reason: str


def _native_like(op: Fields) -> _native.OpReport:
    """The fields as the core reports them: structs as named tuples, times of clocks in ns."""
    status = "partial" if op["status"] == "void" else op["status"]
    values = {
        **op,
        "status": status,
        "entered_at": round(1e9 * op["entered_at"]),
        "ended_at": round(1e9 * (op["ended_at"] if "ended_at" in op else op["entered_at"])),
        "scatter": _as(StageReport, op["scatter"]),
        "gather": _as(StageReport, op["gather"]),
        "links": tuple(_link(link) for link in op["links"]),
        "traffic": _as(Traffic, op["traffic"]),
        "energies": SimpleNamespace(**op["energies"]),
        "lr_scale": _as(LrScale, op["lr_scale"]),
        "late": tuple(_as(LateCompletion, late) for late in op["late"]),
        "column": [_native_like(column) for column in op["column"]],
    }
    return cast(_native.OpReport, SimpleNamespace(**values))


def _link(fields: Fields) -> Link:
    stages = {stage: _as(LinkStage, fields[stage]) for stage in ("scatter", "gather")}
    link: Link = _as(Link, {**fields, **stages})
    return link


def _as(kind: Any, fields: Fields) -> Any:
    """The named tuple, from the fields that it knows."""
    return kind(**{name: value for name, value in fields.items() if name in kind._fields})
