"""Copies the training state of this rank for a rank that rejoins, and offers it until that rank has it.

Owns the ids of a rejoin and the copies. Knows nothing of how they are put together or loaded.
"""

from __future__ import annotations

from typing import NamedTuple

from tailcut import _native
from tailcut.engine.state import State
from tailcut.pytorch.image import head_of, parts_of
from tailcut.pytorch.resync import Replica

COPY_STEPS = 4
"""Donors copy in steps that are multiples of this, so that those that hear of a wish within it copy the same
step without asking each other."""

KEPT_S = 600.0
"""A copy is offered so long at most: who wanted it has died, or its last word was lost."""

_HEAD = 0
_DONE = (1 << 20) - 1


class Request(NamedTuple):
    """One attempt of a rank to rejoin. It names the blobs of the attempt."""

    rank: int
    attempt: int

    @property
    def head(self) -> int:
        """To ask for the head is to ask for a copy."""
        return self._id(_HEAD)

    @property
    def done(self) -> int:
        """To ask for this says that the copy is needed no more."""
        return self._id(_DONE)

    def part(self, index: int) -> int:
        return self._id(1 + index)

    def _id(self, place: int) -> int:
        return _native.REJOIN_IDS | self.rank << 32 | self.attempt % (1 << 12) << 20 | place


class _Copy(NamedTuple):
    request: Request
    parts: int
    until_s: float


class Donor:
    """The copies that this rank has made for others: at most one for each."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._wishes: dict[int, Request] = {}  # by rank
        self._copies: dict[int, _Copy] = {}  # by rank
        self._done: dict[int, Request] = {}  # by rank: a wish that comes once more is old

    def begin_pass(self, replica: Replica, step: int, seqs: tuple[int, ...], now_s: float) -> None:
        """An averaged pass begins, with these ops. Nothing of the model changes meanwhile."""
        for rank, blob_id in self._state.take_wanted().items():
            self._note(rank, blob_id)
        for copy in list(self._copies.values()):
            if now_s > copy.until_s:
                self._withdraw(copy.request.rank)
        if step % COPY_STEPS == 0:
            for request in self._wishes.values():
                self._copy(request, replica, step, seqs, now_s)
            self._wishes.clear()

    def _note(self, rank: int, blob_id: int) -> None:
        request = Request(rank, (blob_id >> 20) % (1 << 12))
        if blob_id == request.done:
            self._done[rank] = request
            self._wishes.pop(rank, None)
            self._withdraw(rank)
        elif blob_id == request.head and request not in (self._done.get(rank), self._copied(rank)):
            self._wishes[rank] = request  # other ids are parts of what was withdrawn, or were made up

    def _copied(self, rank: int) -> Request | None:
        """The rank asks again while its copy is made. To copy anew would take that one away."""
        copy = self._copies.get(rank)
        return copy.request if copy else None

    def _copy(
        self, request: Request, replica: Replica, step: int, seqs: tuple[int, ...], now_s: float
    ) -> None:
        self._withdraw(request.rank)
        parts = 0
        for part in parts_of(replica):
            self._state.offer(request.part(parts), part)
            parts += 1
        self._state.offer(request.head, head_of(replica, step, seqs))  # last: who has it finds the parts
        self._copies[request.rank] = _Copy(request, parts, now_s + KEPT_S)

    def _withdraw(self, rank: int) -> None:
        copy = self._copies.pop(rank, None)
        if copy is not None:
            for blob_id in (copy.request.head, *map(copy.request.part, range(copy.parts))):
                self._state.withdraw(blob_id)
