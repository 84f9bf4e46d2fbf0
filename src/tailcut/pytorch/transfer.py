"""One attempt of a rank that rejoins to fetch a state: which donors have it, and which parts have come.

It is told the time and never blocks but in ``wait``. All donors of a transfer have copied the same step. A
part that one donor does not bring is asked of another once there is nothing else to ask for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto

import numpy as np

from tailcut.engine.state import Bytes, Fetch, FetchStatus, State
from tailcut.pytorch.donor import Request
from tailcut.pytorch.image import MOST_HEAD_BYTES, PART_BYTES, Head, read_head

ASK_AGAIN_S = 0.01
"""A donor that has no copy yet is asked again after this long."""

AT_ONCE = 4
"""Parts asked of a donor at a time: it is never idle while we look."""


class Outcome(Enum):
    """What became of a transfer."""

    UNDER_WAY = auto()
    COMPLETE = auto()
    STALLED = auto()
    """Ranks are heard, and none of them brings anything."""
    ALONE = auto()
    """Nobody has been heard for the limit."""


class Transfer:
    """Fetches the copies of ``request`` from those of the ``ranks`` that make one. ``accept`` is told of
    the first head: it may want another one, and raises if none will fit. It is waited for at most
    ``head_limit_s``, and for each thing that comes later ``limit_s``."""

    def __init__(
        self,
        state: State,
        request: Request,
        ranks: Iterable[int],
        accept: Callable[[Head], bool],
        head_limit_s: float,
        limit_s: float,
        now_s: float,
    ) -> None:
        self._state = state
        self._request = request
        self._accept = accept
        self._head_limit_s = head_limit_s
        self._limit_s = limit_s
        self._heads = {rank: self._ask_head(rank) for rank in ranks}  # of those that have not brought it
        self._again_at_s = dict.fromkeys(self._heads, 0.0)
        self.heard: set[int] = set()
        """Ranks that have answered."""
        self.head: Head | None = None
        """Of the first donor. Who has copied another step is no donor."""
        self.image: Bytes = np.empty(0, np.uint8)
        self.brought: dict[int, int] = {}
        """By part: its donor."""
        self.head_from = -1
        """The first donor."""
        self._donors: set[int] = set()  # those that are asked
        self._missing: deque[int] = deque()  # parts that nobody is asked for
        self._coming: dict[tuple[int, int], Fetch] = {}  # by donor and part, oldest first
        self._left: set[int] = set()  # parts that have not come
        self._behind_ops = 0
        self._heard_at_s = self._brought_at_s = now_s

    def advance(self, now_s: float, behind_ops: int = 0) -> Outcome:
        """Take what has come, and ask for more. ``behind_ops``: how far ahead the others are known to be.
        While they move, a copy will come."""
        if self.head is None and behind_ops != self._behind_ops:
            self._behind_ops, self._brought_at_s = behind_ops, now_s
        for rank, fetch in list(self._heads.items()):
            self._take_head(rank, fetch, now_s)
        for (rank, part), fetch in list(self._coming.items()):
            self._take_part(rank, part, fetch, now_s)
        for rank in sorted(self._donors):
            while sum(donor == rank for donor, _ in self._coming) < AT_ONCE and self._ask_part(rank):
                pass
        return self._outcome(now_s)

    def wait(self, most_s: float) -> None:
        """Block until something may have come."""
        for fetch in [*self._coming.values(), *self._heads.values()][:1]:
            fetch.poll(int(1e9 * most_s))

    def _outcome(self, now_s: float) -> Outcome:
        if self.head is not None and not self._left:
            return Outcome.COMPLETE
        limit_s = self._head_limit_s if self.head is None else self._limit_s
        if now_s - self._heard_at_s > limit_s:
            return Outcome.ALONE
        nobody = not self._heads and not self._donors
        return Outcome.STALLED if nobody or now_s - self._brought_at_s > limit_s else Outcome.UNDER_WAY

    # ---- heads

    def _ask_head(self, rank: int) -> Fetch:
        return self._state.fetch(rank, self._request.head, MOST_HEAD_BYTES)

    def _take_head(self, rank: int, fetch: Fetch, now_s: float) -> None:
        status = fetch.poll()
        if status is FetchStatus.PENDING or now_s < self._again_at_s[rank]:
            return
        self._hear(rank, now_s)
        if status is FetchStatus.ABSENT:  # it lives, and has not copied yet
            self._again_at_s[rank] = now_s + ASK_AGAIN_S
            self._heads[rank] = self._ask_head(rank)
            return
        del self._heads[rank]
        if status is FetchStatus.COMPLETE:
            self._brought_at_s = now_s
            self._admit(rank, read_head(fetch.blob))

    def _admit(self, rank: int, head: Head) -> None:
        if self.head is None:
            if not self._accept(head):
                return
            self.head, self.head_from = head, rank
            self.image = np.empty(head.image_bytes, np.uint8)
            self._missing.extend(range(head.parts))
            self._left.update(range(head.parts))
        if head.place == self.head.place:
            self._donors.add(rank)

    def _hear(self, rank: int, now_s: float) -> None:
        self.heard.add(rank)
        self._heard_at_s = now_s

    # ---- parts

    def _ask_part(self, rank: int) -> bool:
        """Ask a donor for a part that nobody is asked for, else for one that another has not brought yet."""
        slow = [part for _, part in self._coming if (rank, part) not in self._coming]
        if not self._missing and not slow:
            return False
        part = self._missing.popleft() if self._missing else slow[0]
        self._coming[rank, part] = self._state.fetch(rank, self._request.part(part), PART_BYTES)
        return True

    def _take_part(self, rank: int, part: int, fetch: Fetch, now_s: float) -> None:
        status = fetch.poll()
        if part not in self._left:  # another donor was sooner
            self._coming.pop((rank, part), None)
        elif status is not FetchStatus.PENDING and (rank, part) in self._coming:
            if status is FetchStatus.COMPLETE and self._put(part, fetch.blob):
                del self._coming[rank, part]
                self._hear(rank, now_s)
                self._brought_at_s = now_s
                self.brought[part] = rank
            else:
                self._dismiss(rank)

    def _put(self, part: int, blob: Bytes) -> bool:
        """Whether the part is as long as it must be."""
        place = self.image[part * PART_BYTES : (part + 1) * PART_BYTES]
        if len(place) != len(blob):
            return False
        place[:] = blob
        self._left.discard(part)
        return True

    def _dismiss(self, rank: int) -> None:
        """A donor has no copy any more."""
        self._donors.discard(rank)
        parts = [part for donor, part in self._coming if donor == rank]
        self._coming = {key: fetch for key, fetch in self._coming.items() if key[0] != rank}
        asked = {part for _, part in self._coming}
        self._missing.extend(part for part in parts if part not in asked)
