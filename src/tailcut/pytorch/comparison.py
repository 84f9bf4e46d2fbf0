"""Compares blocks of an agreed step with those of their owners, and fetches those that differ.

Runs on one thread. Owns what this rank offers of its own blocks, and the fetches under way. Knows nothing of
passes, turns or of how a correction is applied.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tailcut.engine.state import Fetch, FetchStatus, State
from tailcut.pytorch.blocks import Block, Segment
from tailcut.pytorch.correction import Correction
from tailcut.pytorch.drift import (
    Words,
    differences,
    fingerprint,
    norms,
    random_signs,
    ratio,
)

KEPT_STEPS = 32
"""Copies of a step are offered for so many steps, and awaited as long."""

HEAD_WORDS = 2
"""Before the fingerprints: the wish of the owner, and which blocks it has compared."""

ROUNDING = float(torch.finfo(torch.float32).eps)
"""Blocks that differ by less are left alone: steps pass before a correction, so it does not get closer."""


@dataclass(frozen=True)
class SetAside:
    """A block of an agreed step, copied."""

    block: Block
    copies: Sequence[Segment]
    offered: bool
    """Its owner offers it, and who differs fetches it."""


@dataclass(frozen=True)
class _Asked:
    """Fingerprints of an owner's blocks under way."""

    step: int
    owner: int
    compared: list[tuple[SetAside, Words]]
    fetch: Fetch


class _Measured(NamedTuple):
    """Norms of the parameters in a block."""

    difference: float
    norm: float


@dataclass(frozen=True)
class _Coming:
    """A block that differs under way."""

    step: int
    own: SetAside
    fetch: Fetch


UnderWay = TypeVar("UnderWay", _Asked, _Coming)


class Comparison:
    """The blocks of one rank against those of their owners."""

    def __init__(self, state: State, rank: int, ranks: int, seed: int) -> None:
        self._state = state
        self._rank = rank
        self._ranks = ranks
        self._signs = random_signs(seed)
        self._offered: list[tuple[int, int]] = []  # step and id, oldest first
        self._asked: list[_Asked] = []
        self._coming: list[_Coming] = []
        self._measured: dict[Block, _Measured] = {}
        self.drift = 0.0
        """The norm of the difference to the owners' parameters, relative to theirs, when last measured."""
        self.wish = 0
        """The latest step from which some rank wants all blocks compared."""

    @property
    def under_way(self) -> bool:
        """Whether something may come. Any thread may ask."""
        return bool(self._asked or self._coming)

    def begin(self, step: int, blocks: Sequence[SetAside]) -> None:
        """Offer this rank's own blocks of a step, and ask for the fingerprints of the others."""
        by_owner: dict[int, list[tuple[SetAside, Words]]] = {rank: [] for rank in range(self._ranks)}
        for aside in blocks:
            by_owner[aside.block.owner].append((aside, fingerprint(aside.copies, self._signs)))
        own = by_owner.pop(self._rank)
        for aside, _ in own:  # before their fingerprints, so that who has these finds them
            if aside.offered:
                self._offer(step, blob_id(step, aside.block), bytes_of(aside.copies).numpy())
        head = np.array([self.wish, _contents(own)], np.uint64)
        self._offer(step, blob_id(step), np.concatenate([head, *(words for _, words in own)]))
        for owner, compared in by_owner.items():
            self._ask(step, owner, compared)

    def compare(self, now: int) -> list[Correction]:
        """Take what has come by this step."""
        for asked in _ended(self._asked):
            if asked.fetch.poll() is FetchStatus.COMPLETE:
                self._compare(asked)
            elif asked.fetch.poll() is FetchStatus.ABSENT:  # the owner has not come so far
                self._ask(asked.step, asked.owner, asked.compared)
        corrections = [
            _correction(coming)
            for coming in _ended(self._coming)
            if coming.fetch.poll() is FetchStatus.COMPLETE
        ]
        self._drop(now - KEPT_STEPS)
        return [correction for correction in corrections if correction is not None]

    def restart(self) -> None:
        """All replicas are equal: nothing that is under way is of use."""
        self._drop(math.inf)
        self._measured.clear()
        self.drift = 0.0
        self.wish = 0

    def forget_measured(self) -> None:
        """Blocks are cut in another way."""
        self._measured.clear()

    def _offer(self, step: int, blob: int, values: npt.NDArray[Any]) -> None:
        self._state.offer(blob, values)
        self._offered.append((step, blob))

    def _ask(self, step: int, owner: int, compared: list[tuple[SetAside, Words]]) -> None:
        words = HEAD_WORDS + sum(len(own) for _, own in compared)
        fetch = self._state.fetch(owner, blob_id(step), 8 * words)
        self._asked.append(_Asked(step, owner, compared, fetch))

    def _drop(self, before: float) -> None:
        for step, blob in self._offered:
            if step < before:
                self._state.withdraw(blob)
        self._offered = [(step, blob) for step, blob in self._offered if step >= before]
        self._asked = [asked for asked in self._asked if asked.step >= before]
        self._coming = [coming for coming in self._coming if coming.step >= before]

    def _compare(self, asked: _Asked) -> None:
        blob = asked.fetch.blob
        if len(blob) != 8 * (HEAD_WORDS + sum(len(own) for _, own in asked.compared)):
            return  # the owner has another optimizer state; only resync() can help
        words = blob.view(np.uint64)
        if words[0] <= asked.step + KEPT_STEPS:
            self.wish = max(self.wish, int(words[0]))
        if words[1] != _contents(asked.compared):
            return  # only one of us knows of a wish
        at = HEAD_WORDS
        for aside, own in asked.compared:
            self._measure(asked.step, aside, differences(own, words[at : at + len(own)]))
            at += len(own)
        measured = self._measured.values()
        self.drift = ratio(
            math.hypot(*(m.difference for m in measured)), math.hypot(*(m.norm for m in measured))
        )

    def _measure(self, step: int, aside: SetAside, apart: list[float]) -> None:
        sizes = norms(aside.copies)
        self._measured[aside.block] = _Measured(apart[0], sizes[0])
        if aside.offered and max(map(ratio, apart, sizes)) > ROUNDING:
            block = aside.block
            size = sum(segment.values.nbytes for segment in aside.copies)
            fetch = self._state.fetch(block.owner, blob_id(step, block), size)
            self._coming.append(_Coming(step, aside, fetch))


def _contents(compared: Iterable[tuple[SetAside, Words]]) -> int:
    """Which blocks these are."""
    return _hash_of([(aside.block.key, aside.block.first, aside.offered) for aside, _ in compared])


def blob_id(step: int, block: Block | None = None) -> int:
    """The id of a block of a step, or of the fingerprints of the step."""
    named = (step, block.key, block.first) if block else (step,)
    return _hash_of(named)


def _hash_of(named: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(named).encode(), digest_size=8).digest(), "little")


def bytes_of(copies: Iterable[Segment]) -> torch.Tensor:
    return torch.cat([segment.values.view(torch.uint8) for segment in copies])


def from_bytes(blob: npt.NDArray[np.uint8], own: Sequence[Segment]) -> list[torch.Tensor] | None:
    """The values of another rank, segment by segment; None if its state has another form than the own."""
    if len(blob) != sum(segment.values.nbytes for segment in own):
        return None
    parts = torch.split(torch.from_numpy(blob), [segment.values.nbytes for segment in own])
    # A copy of each part, because a view of another dtype must begin at a multiple of its size.
    return [part.clone().view(s.values.dtype) for part, s in zip(parts, own, strict=True)]


def _correction(coming: _Coming) -> Correction | None:
    own = coming.own.copies
    owners = from_bytes(coming.fetch.blob, own)
    return None if owners is None else Correction(coming.own.block, coming.step, own, owners)


def _ended(under_way: list[UnderWay]) -> list[UnderWay]:
    """Take out what is no longer pending."""
    ended = [one for one in under_way if one.fetch.poll() is not FetchStatus.PENDING]
    under_way[:] = [one for one in under_way if one.fetch.poll() is FetchStatus.PENDING]
    return ended
