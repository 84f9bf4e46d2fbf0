"""What one rank of a replay gives to the others and takes from them: contributions, and means part by part.

Owns the names of blobs and how long they are kept. The script says who needs what, which all work out alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import quote

from tailcut.errors import ReplayError
from tailcut.ledger.fates import Runs
from tailcut.ledger.records import OpRecord
from tailcut.replay.exchange import Exchange
from tailcut.replay.granules import overlap
from tailcut.replay.script import Closing, Script

PATIENCE_S = 600.0
"""How long a rank waits for another that is there: it may load a dataset or compile a model meanwhile."""

SLICE_S = 0.05
"""A rank that waits looks so often whether it can serve its shard meanwhile, as an engine does."""


class Deliveries:
    """Those of one rank. ``serve`` does something for the others, if it can, and returns whether it did.
    Whoever calls holds the ``lock``, which is released only while something is waited for."""

    def __init__(
        self, script: Script, rank: int, exchange: Exchange, lock: threading.Lock, serve: Callable[[], bool]
    ) -> None:
        self._script = script
        self._own = script.ranks[rank]
        self._rank = rank
        self._exchange = exchange
        self._lock = lock
        self._serve = serve
        self._kept: dict[tuple[int, str, int, str], bytes] = {}  # what is needed again later

    # ---- what this rank gives

    def wants_contribution(self, seq: int, peer: int) -> bool:
        return self._script.ranks[peer].needs_contribution(seq, self._rank)

    def give_contribution(self, seq: int, peer: int, blob: bytes) -> None:
        self._exchange.put(f"{seq}.scatter.{self._rank}.{peer}.whole", blob)

    def wants_mean(self, seq: int, peer: int, closing: Closing) -> bool:
        return bool(overlap(self._script.ranks[peer].needed_mean(seq, self._rank), closing.runs))

    def give_mean(self, seq: int, peer: int, closing: Closing, blob: bytes) -> None:
        self._exchange.put(f"{seq}.gather.{self._rank}.{peer}.{closing.name}", blob)

    def give_copy(self, name: str, peer: int, blob: bytes) -> None:
        self._exchange.put(_blob_name(name, self._rank, peer), blob)

    # ---- what it takes

    def has_contribution(self, seq: int, peer: int) -> bool:
        return (seq, "scatter", peer, "whole") in self._kept or self._exchange.has(
            f"{seq}.scatter.{peer}.{self._rank}.whole"
        )

    def contribution(self, seq: int, peer: int) -> bytes:
        what = f"the contribution of rank {peer} to op {seq}"
        self._record_of(seq, peer, what)
        return self._take(seq, "scatter", peer, "whole", what)

    def mean(self, seq: int, owner: int, runs: Runs) -> bytes:
        """What has these granules of a mean."""
        what = f"the mean of rank {owner} in op {seq}"
        record, own = self._record_of(seq, owner, what), self._own.by_seq[seq]
        if record.voided or record.report.epoch != own.report.epoch:
            raise ReplayError(
                f"rank {self._rank} used {what} in epoch {own.report.epoch}, and rank {owner} then gave the "
                "op up for a later epoch: what it had done is not on record, and the replay cannot go on"
            )
        return b"".join(
            self._take(seq, "gather", owner, closing.name, what)
            for closing in self._script.ranks[owner].closings(seq)
            if overlap(runs, closing.runs)
        )

    def _record_of(self, seq: int, source: int, what: str) -> OpRecord:
        if (record := self._script.ranks[source].by_seq.get(seq)) is not None:
            return record
        raise ReplayError(
            f"rank {self._rank} used {what}, of which rank {source} has no record: it died there, and "
            "what it had not ended is missing beside its ledger (the file .open)"
        )

    def copy(self, name: str, source: int) -> bytes:
        """A part of the training state of another rank, which it gives once."""
        until_s, blob_name = time.monotonic() + PATIENCE_S, _blob_name(name, source, self._rank)
        while (blob := self._poll(blob_name, source, until_s, f"{name} of rank {source}")) is None:
            pass
        return blob

    def _take(self, seq: int, stage: str, source: int, part: str, what: str) -> bytes:
        place, name = (seq, stage, source, part), f"{seq}.{stage}.{source}.{self._rank}.{part}"
        until_s = time.monotonic() + PATIENCE_S
        while place not in self._kept:  # serving may have taken it
            if (blob := self._poll(name, source, until_s, what)) is not None:
                self._kept[place] = blob
        return self._kept[place]

    def _poll(self, name: str, source: int, until_s: float, what: str) -> bytes | None:
        """The blob; None if it has not come within a slice of time, in which others may have been served."""
        if self._exchange.has(name):
            return self._exchange.get(name, source, 0.0)
        with _released(self._lock):
            blob = self._exchange.get(name, source, SLICE_S)
        if blob is None and not self._serve() and (reason := self._why_in_vain(name, source, until_s)):
            raise ReplayError(f"rank {self._rank} waits for {what} in vain: {reason}")
        return blob

    def _why_in_vain(self, name: str, source: int, until_s: float) -> str:
        if (reason := self._exchange.why_left(source)) is not None and not self._exchange.has(name):
            return f"rank {source} has ended ({reason})"
        if time.monotonic() < until_s:
            return ""
        return f"rank {source} does other steps than those that were recorded, or is stuck"

    def forget_what_is_over(self, seq: int) -> None:
        """Op ``seq`` has ended: keep what is of later ones, or taken in by them."""
        last_use = self._own.last_use
        self._kept = {
            place: blob
            for place, blob in self._kept.items()
            if max(place[0], last_use.get(place[:3], -1)) > seq
        }

    def leave(self, reason: str) -> None:
        """Nothing more comes from this rank."""
        self._exchange.leave(self._rank, reason)


@contextmanager
def _released(lock: threading.Lock) -> Iterator[None]:
    lock.release()
    try:
        yield
    finally:
        lock.acquire()


def _blob_name(name: str, source: int, reader: int) -> str:
    """Of a copy, which may be called after a parameter; blobs may be files."""
    return f"copy.{quote(name, safe='')}.{source}.{reader}"
