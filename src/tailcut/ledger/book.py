"""Ledgers as they are read: the files of a run's ranks, joined.

Owns which files belong together and what is missing. A file that is damaged is read as far as it is whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tailcut.errors import ConfigError
from tailcut.ledger.fates import Fates
from tailcut.ledger.frames import Damage, Frame, read, read_ring
from tailcut.ledger.records import Gap, Kind, Note, OpRecord, Start
from tailcut.ledger.writer import OPEN_SUFFIX, SUFFIX

_NAME = re.compile(r"(?P<run>.+\.[0-9a-f]{12})\.rank(?P<rank>\d+)" + re.escape(SUFFIX))


@dataclass(frozen=True)
class RankLedger:
    """The ledger of one rank."""

    start: Start
    ops: tuple[OpRecord, ...]
    """In the order in which they ended."""
    notes: tuple[Note, ...]
    gaps: tuple[Gap, ...]
    damage: tuple[str, ...]
    """What cannot be read, in words."""
    closed: bool
    """The group was closed: the last record is there."""
    served: tuple[OpRecord, ...] = ()
    """What this rank did as an owner in ops that it has not entered."""
    open: tuple[OpRecord, ...] = ()
    """Of a rank that was killed: what it had done in ops that had not ended."""
    late: Fates = field(default_factory=Fates)
    """What it had taken in late since the last op that ended, and the packets of it that came trimmed."""

    @property
    def rank(self) -> int:
        return self.start.rank

    @cached_property
    def by_seq(self) -> Mapping[int, OpRecord]:
        """The ops of the first lane by number."""
        return {op.seq: op for op in self.ops if op.lane == 0}

    @property
    def losses(self) -> tuple[str, ...]:
        """What is not on record, in words."""
        gaps = [f"{gap.records} records were not written: {gap.reason}" for gap in self.gaps]
        end = [] if self.closed else ["it ends without a close: the rank was killed, or still runs"]
        return (*self.damage, *gaps, *end)


class Ledger:
    """One run: the ledgers of its ranks."""

    def __init__(self, directory: Path, run: str, ranks: Mapping[int, RankLedger]) -> None:
        self.directory = directory
        self.run = run
        self.ranks = dict(sorted(ranks.items()))

    @classmethod
    def open(cls, directory: str | os.PathLike[str], run: str | None = None) -> Ledger:
        """Read the ledgers in a directory. If it has those of several runs, ``run`` names one, by a part of
        its name; the default is the latest."""
        place = Path(directory)
        runs = runs_in(place)
        if not runs:
            raise ConfigError(
                f"{str(place)!r} has no ledger: run with Config(ledger=DIRECTORY) or TAILCUT_LEDGER=DIRECTORY"
            )
        chosen = {name: files for name, files in runs.items() if run is None or run in name}
        if not chosen:
            raise ConfigError(f"no run in {str(place)!r} is called {run!r}; there are {', '.join(runs)}")
        if run is not None and len(chosen) > 1:
            raise ConfigError(f"{run!r} names {len(chosen)} runs: {', '.join(chosen)}")
        name = max(chosen, key=lambda name: max(file.stat().st_mtime_ns for file in chosen[name]))
        ranks = [read_rank(file) for file in chosen[name]]
        return cls(place, name, {ledger.rank: ledger for ledger in ranks})

    @property
    def world_size(self) -> int:
        return next(iter(self.ranks.values())).start.ranks

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the group whose ledger is not here."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    @property
    def about(self) -> Mapping[str, Any]:
        """The group and its configuration, as its lowest rank here has them."""
        return next(iter(self.ranks.values())).start.about

    def op(self, seq: int) -> dict[int, OpRecord]:
        """One op, by rank, as far as ranks have it on record."""
        found = {rank: ledger.by_seq[seq] for rank, ledger in self.ranks.items() if seq in ledger.by_seq}
        if not found:
            raise ConfigError(f"no rank has op {seq} on record; {self.described_ops()}")
        return found

    def described_ops(self) -> str:
        """Which ops there are, in words."""
        seqs = [seq for ledger in self.ranks.values() for seq in ledger.by_seq]
        return f"there are ops {min(seqs)} to {max(seqs)}" if seqs else "there are none"

    def losses(self) -> Iterator[str]:
        """All that is not on record, in words, with the rank that lacks it."""
        for rank in self.missing_ranks:
            yield f"rank {rank}: its ledger is not here"
        for rank, ledger in self.ranks.items():
            for loss in ledger.losses:
                yield f"rank {rank}: {loss}"


def runs_in(directory: Path) -> dict[str, list[Path]]:
    """The files of every run in a directory, by its name."""
    runs: dict[str, list[Path]] = {}
    if not directory.is_dir():
        raise ConfigError(f"{str(directory)!r} is no directory; a ledger is one, with a file for each rank")
    for path in sorted(directory.iterdir()):
        if match := _NAME.fullmatch(path.name):
            runs.setdefault(match["run"], []).append(path)
    return runs


def read_rank(path: Path) -> RankLedger:
    """The ledger of one rank, as far as it is whole."""
    found = list(read(path.read_bytes()))
    frames = [entry for entry in found if isinstance(entry, Frame)]
    damage = tuple(str(entry) for entry in found if isinstance(entry, Damage))
    starts = [frame for frame in frames if frame.kind == Kind.START]
    if not starts:
        raise ConfigError(
            f"{str(path)!r} cannot be read: its first record, which says what the others mean, is damaged"
        )
    start = Start.of(starts[0].payload)
    values = [(frame.kind, _json(frame)) for frame in frames if frame.kind in (Kind.GAP, Kind.END)]
    notes = [Note.of(frame.payload) for frame in frames if frame.kind == Kind.NOTE]
    keys = {note.values["number"]: note.values["key"] for note in notes if note.event == "key"}

    def records(kind: Kind, of: Sequence[Frame]) -> tuple[OpRecord, ...]:
        return tuple(OpRecord(start, frame.payload, keys) for frame in of if frame.kind == kind)

    ops, served = records(Kind.OP, frames), records(Kind.SERVED, frames)
    closed = any(frame.kind == Kind.END for frame in frames)
    still: Sequence[Frame] = ()
    if not closed and (ring := path.with_suffix(OPEN_SUFFIX)).exists():
        still = read_ring(ring.read_bytes())
    known = {op.seq for op in ops if op.fates.granules}
    ended = tuple(op for op in records(Kind.OP, still) if op.seq not in known)
    over = known.union(op.seq for op in (*ended, *served))
    # What was taken in late is told once, and all of it up to the end of an op is in the record of that.
    last_ended = max((frame.number for frame in still if frame.kind == Kind.OP), default=-1)
    since = records(Kind.OPEN, [frame for frame in still if frame.number > last_ended])
    latest = {op.seq: _without_late(op) for op in records(Kind.OPEN, still) if op.seq not in over}
    return RankLedger(
        start=start,
        ops=(*ops, *ended),
        notes=tuple(notes),
        gaps=tuple(Gap(value["records"], value["reason"]) for kind, value in values if kind == Kind.GAP),
        damage=damage,
        closed=closed,
        served=served,
        open=tuple(latest.values()),
        late=Fates(
            uses=tuple(use for op in since for use in op.fates.uses),
            cuts=tuple(cut for op in since for cut in op.fates.cuts if cut.late),
        ),
    )


def _without_late(op: OpRecord) -> OpRecord:
    in_time = tuple(cut for cut in op.fates.cuts if not cut.late)
    return op.with_fates(replace(op.fates, uses=(), cuts=in_time))


def _json(frame: Frame) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(frame.payload)
    return values
