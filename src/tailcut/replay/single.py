"""A single op of a replay, with all that its result follows from: stored, and computed again in one process.

Owns which ops that takes, and the file. An op follows from its inputs; from the contributions to earlier ops
that its owners took in late; and from the means of earlier ops that came late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tailcut.errors import ConfigError
from tailcut.ledger.book import Ledger, RankLedger
from tailcut.ledger.records import Note, OpRecord, Start, json_payload
from tailcut.replay.exchange import MemoryExchange
from tailcut.replay.player import Array, Player
from tailcut.replay.script import Script
from tailcut.replay.together import play_together

SUFFIX = ".npz"


def ops_behind(script: Script, seq: int) -> tuple[int, ...]:
    """The ops that the result of one follows from, and itself, in order."""
    by_rank = script.ranks.values()
    means = {parts.seq for own in by_rank for parts in own.late.get(seq, []) if parts.stage == "gather"}
    found, to_do = {seq, *means}, {seq, *means}
    exact = set(to_do)
    while to_do:
        user = to_do.pop()
        for own in by_rank:
            for parts in own.late.get(user, []):
                # What is late is weighed against the mean of its op without what was carried into that.
                handed_over = own.by_seq[parts.seq].report.epoch != own.by_seq[user].report.epoch
                if parts.stage == "scatter" and parts.seq not in found and (user in exact or handed_over):
                    found.add(parts.seq)
                    to_do.add(parts.seq)
    return tuple(sorted(found))


@dataclass(frozen=True)
class SingleOp:
    """What a file has."""

    seq: int
    ledger: Ledger
    """As far as it says something of these ops."""
    inputs: Mapping[tuple[int, int], Array]
    """By op and rank."""
    residues: Mapping[tuple[int, int], Array]
    """By op and rank: what coding had taken from the bucket's op before, where that is carried."""
    outputs: Mapping[int, Array]
    """Of the op, by rank: of those that have ended it."""

    def script(self) -> Script:
        return Script(self.ledger, only=frozenset(seq for seq, _ in self.inputs))

    def again(self) -> dict[int, Array]:
        """The results of the op, by rank, computed again."""
        script, exchange, results = self.script(), MemoryExchange(), dict[int, Array]()

        residues = {place: values.copy() for place, values in self.residues.items()}

        def begin(player: Player, record: OpRecord) -> Array:
            place = record.seq, player.rank
            bucket, tag = self.inputs[place].copy(), int(record.terms["loss_scale_tag"])
            player.begin(record.seq, bucket, tag, residues.get(place))
            return bucket

        def play(player: Player) -> None:
            own = script.ranks[player.rank]
            for record in own.ops:
                bucket = begin(player, record)
                player.end(record, bucket)
                results[player.rank] = bucket
            killed_in = [begin(player, record) for record in own.unended.values() if record.entered]
            player.serve_rest()
            del killed_in  # until here others take what was entered there

        play_together([_PlayerOfOne(script, rank, exchange, self.seq) for rank in script.ranks], play)
        return results


class _PlayerOfOne(Player):
    """Earlier ops are played for what they give to one op, and are not checked."""

    def __init__(self, script: Script, rank: int, exchange: MemoryExchange, seq: int) -> None:
        super().__init__(script, rank, exchange)
        self._seq = seq

    def check_result(self, record: OpRecord, found: int) -> None:
        if record.seq == self._seq:
            super().check_result(record, found)


class Dump:
    """What one rank stores on the way to an op, which it may have died before: others may have used what it
    did in earlier ones. ``join`` makes one file of all ranks' files."""

    def __init__(self, path: Path, seq: int, script: Script, rank: int) -> None:
        script.ledger.op(seq)  # an error if no rank has it
        self.seq = seq
        self._ops = ops_behind(script, seq)
        self._file = part_of(path, rank)
        self._rank = rank
        self._arrays = {**_ledger_arrays(script.ledger.ranks[rank], self._ops)}
        self._save()

    def note_input(self, seq: int, bucket: Array, residue: Array | None) -> None:
        if seq in self._ops:
            self._arrays[f"input.{seq}.{self._rank}"] = bucket.copy()
            if residue is not None:
                self._arrays[f"residue.{seq}.{self._rank}"] = residue.copy()
            self._save()

    def write(self, bucket: Array) -> None:
        """The op has ended with this result."""
        self._arrays[f"output.{self.seq}.{self._rank}"] = bucket
        self._save()

    def _save(self) -> None:
        np.savez(self._file, **self._arrays)  # type: ignore[arg-type]  # its stub has no dict of arrays


def part_of(path: Path, rank: int) -> Path:
    """The file of one rank, until all are joined."""
    return path.with_name(f"{path.name}.rank{rank}{SUFFIX}")


def join(path: Path, ranks: Iterable[int]) -> None:
    """One file of those of all ranks, which are gone then."""
    parts = [part_of(path, rank) for rank in ranks]
    arrays: dict[str, Array] = {}
    for part in parts:
        with np.load(part) as stored:
            arrays.update(stored)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    for part in parts:
        part.unlink()


def read(path: Path) -> SingleOp:
    """The op in a file."""
    try:
        with np.load(path) as stored:
            arrays = dict(stored)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} is no op that was stored ({error}); tailcut replay --op N --dump FILE stores one"
        ) from error
    inputs, residues, outputs, seq = {}, {}, {}, -1
    for name, values in arrays.items():
        kind, *place = name.split(".")
        if kind == "input":
            inputs[int(place[0]), int(place[1])] = values
        elif kind == "residue":
            residues[int(place[0]), int(place[1])] = values
        elif kind == "output":
            seq = int(place[0])
            outputs[int(place[1])] = values
    starts = (name.split(".") for name in arrays if name.startswith("start."))
    ranks = {rank: _rank_ledger(arrays, rank) for rank in sorted(int(place[-1]) for place in starts)}
    return SingleOp(seq, Ledger(path.parent, path.name, ranks), inputs, residues, outputs)


def _ledger_arrays(ledger: RankLedger, ops: tuple[int, ...]) -> dict[str, Array]:
    """The records that say something of these ops."""
    kept = [op for op in ledger.ops if not {op.seq, *_told_of(op)}.isdisjoint(ops)]
    served, unended = ([op for op in kind if op.seq in ops] for kind in (ledger.served, ledger.open))
    epochs = [note for note in ledger.notes if note.event == "epoch"]
    payloads = {
        "start": [json_payload(ledger.start.about)],
        "op": [op.payload for op in kept],
        "served": [op.payload for op in served],
        "open": [op.payload for op in unended],
        "note": [json_payload({"event": note.event, **note.values}) for note in epochs],
    }
    return {
        f"{kind}.{number}.{ledger.rank}": np.frombuffer(payload, np.uint8)
        for kind, of_kind in payloads.items()
        for number, payload in enumerate(of_kind)
    }


def _told_of(op: OpRecord) -> Iterator[int]:
    """The other ops that a record says something of."""
    yield from (use.user for use in op.fates.uses)
    yield from (cut.seq for cut in op.fates.cuts)


def _rank_ledger(arrays: Mapping[str, Array], rank: int) -> RankLedger:
    def payloads(kind: str) -> list[bytes]:
        numbered = [
            (int(name.split(".")[1]), values.tobytes())
            for name, values in arrays.items()
            if name.startswith(f"{kind}.") and name.endswith(f".{rank}")
        ]
        return [payload for _, payload in sorted(numbered)]

    start = Start.of(payloads("start")[0])
    ops, served, unended = (
        tuple(OpRecord(start, payload, {}) for payload in payloads(kind)) for kind in ("op", "served", "open")
    )
    notes = tuple(Note.of(payload) for payload in payloads("note"))
    return RankLedger(start, ops, notes, (), (), closed=True, served=served, open=unended)
