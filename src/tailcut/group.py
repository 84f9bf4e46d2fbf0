"""The public object: a group of ranks that average vectors, each op bounded by its deadline.

Owns what a caller sees: arguments, waiting, warnings, the end. The work is done in engine/.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import TracebackType
from typing import Any

from tailcut import notices
from tailcut.config import Config, configured
from tailcut.engine.buffers import bucket_of
from tailcut.engine.opening import open_rank
from tailcut.engine.ops import SLICE_NS, Flight, Ops, Run
from tailcut.engine.replaying import open_replay
from tailcut.errors import ConfigError, TailcutError
from tailcut.report import Report
from tailcut.stats import Stats
from tailcut.store import Store


class Work:
    """One op in flight. ``wait()`` ends by the deadline and returns the report."""

    def __init__(self, group: Group, flight: Flight) -> None:
        self._group = group
        self._flight = flight
        self._lock = threading.Lock()
        self._outcome: Report | TailcutError | None = None

    def wait(self) -> Report:
        """Block until the op has ended; the array then holds the result."""
        self._group._ops.check_process()
        with self._lock:
            while not self._poll(SLICE_NS):
                pass
        if isinstance(self._outcome, TailcutError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def done(self) -> bool:
        """Whether ``wait()`` would return at once. Never blocks, even if another thread waits."""
        self._group._ops.check_process()
        if self._lock.acquire(blocking=False):
            try:
                return self._poll(0)
            finally:
                self._lock.release()
        return self._outcome is not None

    def _poll(self, timeout_ns: int) -> bool:
        if self._outcome is None:
            self._outcome = self._group._ops.take(self._flight.lane, self._flight.ticket, timeout_ns)
            self._group._sound_alarms()  # after the outcome is kept: a warning may be raised
        return self._outcome is not None


class Group:
    """``world_size`` ranks that average float32 arrays, in place.

    Every rank calls ``allreduce`` in the same order with arrays of the same length. An op ends at the latest
    ``config.deadline_s`` after the rank's own call, whatever the network or a peer does. Its report says what
    is missing. A group is a context manager: leaving it closes the group.

    ``settings`` are fields of ``Config``, such as ``deadline_s=5``; they come before those of ``config``.
    ``on_over_budget`` is called when a hundred ops in a row have cost more than ``config.budget``, and not
    again before that has ended. ``wait()`` or ``done()`` calls it, and raises what it raises.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        config: Config | None = None,
        *,
        name: str = "default",
        on_over_budget: Callable[[Stats], None] | None = None,
        **settings: Any,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = configured(config, settings)
        self._on_over_budget = on_over_budget
        self._opened_at = notices.users_place()
        open_one = open_replay if self.config.replay else open_rank
        opening = open_one(rank, world_size, store, self.config, name)
        self.tag = opening.tag
        self.local_address = opening.local_address
        self.codec = opening.codec
        self._description = opening.description
        self._steering = opening.steering
        self._ops = Ops(opening, self.config.trim_bytes)

    def allreduce(
        self,
        array: object,
        key: Hashable = None,
        *,
        reliable: Sequence[Run] = (),
        loss_scale: float = 0.0,
        contribute: bool = True,
    ) -> Work:
        """Start averaging ``array`` over the ranks, in place, and return at once. Between hosts the mean may
        err by ``config.budget``, which suits gradients. With ``planes=16`` it errs by 1e-9, with
        ``codec="raw"`` not at all.

        ``array`` is contiguous float32 in host memory: a NumPy array, ``array.array("f")``, a memoryview or a
        CPU tensor. It must not be touched until ``wait()`` returns. ``key`` names the bucket and is the same
        on all ranks. One op of a key is in flight at a time. With several lanes the key chooses the lane.

        ``reliable`` are runs of coordinates, each the first one and their number. The blocks that hold them
        are waited for up to ``config.deadline_s``, while the others end at their bounds (docs/late.md).

        ``loss_scale`` is what the loss was multiplied by, the same on all ranks; 0 is none. What was late for
        an op with another scale is multiplied by the ratio of the two before it is added.

        With ``contribute=False`` the rank abstains: the values of ``array`` count for nothing, and it only
        takes the mean. A rank that is behind takes what it has missed in this way (``behind_ops``). It waits
        for means that the others have kept up to ``config.deadline_s``. If some are gone, the op ends soon,
        with the status partial.
        """
        bucket = bucket_of(array)
        for first, count in reliable:
            if not 0 <= first <= first + count <= bucket.size:
                raise ConfigError(
                    f"reliable has {count} coordinates from {first} on, and the array has {bucket.size}"
                )
        return Work(self, self._ops.submit(bucket, key, reliable, loss_scale, contribute))

    def skipped(self, reports: Iterable[Report]) -> None:
        """Declare that nobody applied the results of these ops, for instance for an Inf in one of them.

        All ranks call it for the same ops, before the next ``allreduce``. What had come late and entered
        these results enters the next ones of the same keys. What is late for these ops is given up.
        """
        self._ops.check_process()
        self._ops.skipped(reports)

    def resynced(self) -> None:
        """Declare that this rank's state was copied from a peer: it contributes again."""
        self._ops.resynced()

    @property
    def behind_ops(self) -> int:
        """How many ops at least half of the other ranks have entered and this one has not, as far as it has
        heard. It never blocks. In a grid it is always 0."""
        return self._ops.behind_ops

    def describe(self) -> str:
        """What this group will do: its effective configuration, on one line."""
        return self._description

    @property
    def lr_scale(self) -> float:
        """1/(1 + ε) as rank 0 has announced it, the same on all ranks after the same op. A learning rate that
        is multiplied by it keeps the noise of the gradients as it was. With several lanes it is always 1."""
        return self._steering.lr_scale

    def take_news(self) -> list[str]:
        """What was decided since the last call, and why. It is enough if one rank says so."""
        return self._ops.take_news()

    def stats(self) -> Stats:
        """Totals since the group opened. Counts of packets are at most as old as the last idle moment."""
        return self._ops.stats()

    def close(self, linger_s: float | None = None) -> None:
        """Say goodbye, and serve what peers still need until all have said it, but not longer than
        ``linger_s``.

        The default is the deadline. With 0 nothing is waited for.
        """
        self._ops.close(self.config.deadline_s if linger_s is None else max(0.0, linger_s))

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(linger_s=None if kind is None else 0.0)

    def __del__(self) -> None:
        try:
            if hasattr(self, "_ops"):
                self.close(linger_s=0.0)  # the engine may still write to arrays that go with the group
        except Exception:  # names that closing needs may be gone when the interpreter ends
            pass  # nobody can handle it here, and Python would print it

    def _sound_alarms(self) -> None:
        alarms, excess = self._ops.take_alarms()
        for alarm in alarms:
            notices.warn(alarm, self._opened_at)
        if excess and self._on_over_budget is not None:
            self._on_over_budget(self.stats())
