"""The public object: a group of ranks that average vectors, each op bounded by its deadline.

Owns the lanes, the ops in flight and their buffers. Knows nothing of packets.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tailcut import _native
from tailcut.codec import CODEC_IDS, trimmed_payload_bytes
from tailcut.config import Config
from tailcut.errors import ClosedError, ConfigError, TailcutError
from tailcut.grid import grid_of
from tailcut.meeting.addresses import is_loopback
from tailcut.meeting.rendezvous import Roster, Route, local_address, meet, open_lanes
from tailcut.policy.grid import GridSteering
from tailcut.report import Report, outcome_of
from tailcut.stats import Stats
from tailcut.store import Store

_TRIMMED = (
    "tailcut: a switch on the way trims packets, and trim_bytes=0 says that none does: set Config.trim_bytes "
    "to the shortest frame that it leaves (256 is common), so that every coordinate keeps its first plane"
)

_SLICE_NS = 50_000_000
"""Longest single native wait, so that Ctrl-C is answered."""


class Work:
    """One op in flight. ``wait()`` ends by the deadline and returns the report."""

    def __init__(self, group: Group, lane_index: int, ticket: int) -> None:
        self._group = group
        self._lane_index = lane_index
        self._ticket = ticket
        self._lock = threading.Lock()
        self._outcome: Report | TailcutError | None = None

    def wait(self) -> Report:
        """Block until the op has ended; the array then holds the result."""
        self._group._check_process()
        with self._lock:
            while not self._poll(_SLICE_NS):
                pass
        if isinstance(self._outcome, TailcutError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def done(self) -> bool:
        """Whether ``wait()`` would return at once."""
        self._group._check_process()
        with self._lock:
            return self._poll(0)

    def _poll(self, timeout_ns: int) -> bool:
        if self._outcome is None:
            self._outcome = self._group._take_outcome(self._lane_index, self._ticket, timeout_ns)
            self._group._sound_alarms()  # when the outcome is kept: a warning may be an error to the caller
        return self._outcome is not None


class Group:
    """``world_size`` ranks that average float32 arrays, in place.

    Every rank calls ``allreduce`` in the same order with arrays of the same length. An op ends by
    ``config.deadline_s`` after the rank's own call, whatever the network or a peer does; its report says
    what is missing. A context manager: leaving it closes the group.

    ``on_over_budget`` is called by ``wait()`` or ``done()`` when ops have cost more than ``config.budget``
    for a hundred in a row, once until that ends. What it raises, they raise.
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
    ) -> None:
        if not 1 <= world_size <= 0xFFFF:
            raise ConfigError(f"world_size={world_size} must be between 1 and 65535")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} must be between 0 and world_size - 1 = {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.config = config or Config()
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self._totals = Stats()
        self._calls = 0
        self._on_over_budget = on_over_budget
        self._told_excess = False
        self._trimmed = self._told_trimmed = False
        self._keys: set[Hashable] = set()
        # What the engine may still write to: the array stays alive even if its Work is dropped.
        self._in_flight: dict[
            tuple[int, int], tuple[npt.NDArray[np.float32], weakref.ref[Work], Hashable]
        ] = {}
        self._grid = grid_of(world_size, self.config.rows, self.config.multicast)
        if self._grid.rows > 1 and self.config.over_budget == "skip":
            raise ConfigError(
                f"over_budget='skip' is for groups without rows, and {world_size} ranks make "
                f"{self._grid.rows}: take 'wait' or 'raise', or set rows=1"
            )
        self._lanes = self._open(store, name)
        _open_groups.add(self)

    def _open(self, store: Store, name: str) -> list[_native.UdpLane]:
        config = self.config
        lanes = open_lanes(config)
        roster = meet(store, name, self.rank, self._grid, lanes, config)
        buffer_bytes = min(lane.receive_buffer_bytes for lane in lanes)
        self.tag = roster.tag
        self.local_address = local_address(roster, self.rank)
        self.codec = _codec(config, roster)
        may_be_trimmed = self.codec == "planes" and roster.hosts > 1 and config.trim_bytes > 0
        trimming = _receive_trimmed(lanes) if may_be_trimmed else ""
        self._steering = GridSteering(
            rank=self.rank,
            grid=self._grid,
            deadline_s=config.deadline_s,
            planes=config.planes if self.codec == "planes" else 16,
            budget=config.budget,
            over_budget=config.over_budget,
            straggler_share=config.straggler_share,
            adaptive=config.adaptive,
            trimmable=config.trim_bytes > 0,
            lanes=config.lanes,
        )
        coding = f"codec {self.codec}"
        if self.codec == "planes":
            coding += f" with {self._steering.describe_planes()}"
        description = _describe(config, roster, self.rank, coding, buffer_bytes)
        self._description = f"{description}; {self._steering.describe()}{trimming}"
        for index, lane in enumerate(lanes):
            if self.codec == "planes":
                lane.mark(config.dscp)
            self._start(lane, index, roster)
        return lanes

    def _start(self, lane: _native.UdpLane, index: int, roster: Roster) -> None:
        peers = [
            _native.PeerSettings(
                card.window_bytes,
                card.pool_bytes,
                route.payload_bytes,
                _trim_payload_bytes(self.config, route),
                paced=not is_loopback(route.address),
            )
            for card, route in zip(roster.cards, roster.routes, strict=True)
        ]
        lane.start(
            rank=self.rank,
            ranks=self.world_size,
            rows=self._grid.rows,
            seed=self.config.seed,
            group_tag=(roster.tag + index) % _native.TAGS,
            window_ops=self.config.window_ops,
            codec=CODEC_IDS[self.codec],
            resend=self.config.resend,
            pool_bytes=self.config.pool_bytes,
            window_bytes=roster.cards[self.rank].window_bytes,
            terms=self._steering.terms(0),
            peers=peers,
            addresses=[
                (int(ipaddress.IPv4Address(route.address)), card.ports[index])
                for card, route in zip(roster.cards, roster.routes, strict=True)
            ],
            members=roster.multicast.members,
            group_path=_group_path(self.config, roster),
        )

    def allreduce(self, array: npt.NDArray[np.float32], key: Hashable = None) -> Work:
        """Start averaging ``array`` over the ranks, in place; returns at once. Between hosts the mean may err
        by ``config.budget``, as gradients may; with ``planes=16`` by 1e-9, with ``codec="raw"`` not at all.

        The array must not be touched until ``wait()`` returns. ``key`` names the bucket: one op of a key is
        in flight at a time, and with several lanes it chooses the lane: the same on all ranks.
        """
        bucket = _check_array(array)
        self._check_process()  # before the lock, which a forked child may find taken for ever
        with self._lock:
            self._check_open()
            self._forget_dropped()
            if key is not None and key in self._keys:
                raise ConfigError(f"key {key!r} is still in flight; wait() for it first")
            lane_index = (self._calls if key is None else zlib.crc32(repr(key).encode())) % len(self._lanes)
            self._calls += 1
            lane = self._lanes[lane_index]
            ticket = lane.submit(bucket, self._steering.terms(bucket.size))
            work = Work(self, lane_index, ticket)
            self._in_flight[lane_index, ticket] = (array, weakref.ref(work), key)
            if key is not None:
                self._keys.add(key)
            return work

    def resynced(self) -> None:
        """Declare that this rank's state was copied from a peer: it contributes again."""
        self._check_open()
        for lane in self._lanes:
            lane.resynced()

    def describe(self) -> str:
        """What this group will do: its effective configuration, on one line."""
        return self._description

    @property
    def lr_scale(self) -> float:
        """1/(1 + ε) as rank 0 has announced it, the same on all ranks after the same op: a factor for the
        learning rate that keeps the noise of gradients in it what it was. Never imposed; 1 with several
        lanes."""
        return self._steering.lr_scale

    def take_news(self) -> list[str]:
        """What was decided since the last call, and why; one rank's words are enough."""
        with self._lock:
            return self._steering.take_news()

    def stats(self) -> Stats:
        """Totals since the group opened; the network's part is at most as old as the last idle moment."""
        self._check_process()
        lanes = [lane.stats() for lane in self._lanes]
        with self._lock:
            spending = self._steering.spending
            totals = replace(
                self._totals,
                bounds=self._steering.known_bounds,
                verdicts=self._steering.verdicts,
                drop_share=self._steering.drop_share,
                epsilon=spending.total,
                recent_epsilon=spending.recent,
                budget=spending.budget,
                lr_scale=self._steering.lr_scale,
            )
        for lane in lanes:
            totals.add_lane(lane)
        totals.rtt_s = tuple(ns / 1e9 for ns in lanes[0].rtt_ns)
        return totals

    def close(self, linger_s: float | None = None) -> None:
        """Say goodbye and serve what peers still need, until all have said it, at most ``linger_s``.

        That is the deadline if not given; with 0 nothing is waited for.
        """
        if os.getpid() != self._process or self._closed:
            return
        with self._lock:
            self._closed = True
        linger_ns = int(1e9 * (self.config.deadline_s if linger_s is None else max(0.0, linger_s)))
        for lane in self._lanes:
            lane.close(linger_ns)
        try:
            for lane in self._lanes:
                while not lane.join(_SLICE_NS):
                    pass
        except BaseException:  # Ctrl-C: leave now, but not without the engine threads
            for lane in self._lanes:
                lane.close(0)
                lane.join(10 * 1_000_000_000)
            raise
        finally:
            _open_groups.discard(self)

    def __enter__(self) -> Group:
        return self

    def __del__(self) -> None:
        if hasattr(self, "_lanes"):
            self.close(linger_s=0.0)  # before the arrays go that the engine may still write to

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(linger_s=None if kind is None else 0.0)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(
                f"this group belongs to process {self._process}; a forked child must open its own "
                "(or start workers with the spawn method)"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError("the group is closed")

    def _forget_dropped(self) -> None:
        """Take the reports of works that were dropped without wait()."""
        for (lane_index, ticket), (_, work, _) in list(self._in_flight.items()):
            if work() is None:
                self._take_outcome(lane_index, ticket, 0)

    def _take_outcome(self, lane_index: int, ticket: int, timeout_ns: int) -> Report | TailcutError | None:
        lane = self._lanes[lane_index]
        native = lane.wait(ticket, timeout_ns)
        if native is None:
            return None
        with self._lock:
            _, _, key = self._in_flight.pop((lane_index, ticket), (None, None, None))
            self._keys.discard(key)
            outcome = outcome_of(native, self._grid, self.rank, key)
            lane.forget(ticket)  # last: Ctrl-C up to here, and wait() can be called again
            if isinstance(outcome, Report):
                outcome = self._steering.after(outcome, native.ended_at / 1e9)
                self._totals.count(outcome)
                self._trimmed |= outcome.traffic.trimmed_packets > 0
                if outcome.status != "behind":
                    outcome = self._steering.excess() or outcome
        return outcome

    def _sound_alarms(self) -> None:
        with self._lock:
            alarms = self._steering.take_alarms()
            if self._trimmed and not self._told_trimmed and not self.config.trim_bytes:
                self._told_trimmed = True
                alarms.append(_TRIMMED)
            persistent = self._steering.spending.persistent
            excess = persistent and not self._told_excess
            self._told_excess = persistent
        for alarm in alarms:
            warnings.warn(alarm, RuntimeWarning, stacklevel=4)  # where wait() or done() is called
        if excess and self._on_over_budget is not None:
            self._on_over_budget(self.stats())


_open_groups: weakref.WeakSet[Group] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for group in list(_open_groups):
        group.close(linger_s=0.0)


def _abandon_all() -> None:
    for group in list(_open_groups):
        for lane in group._lanes:
            lane.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _codec(config: Config, roster: Roster) -> str:
    """What all ranks come to alike: they have the same roster."""
    if len(roster.cards) == 1:  # the mean is the vector
        return "raw"
    if config.codec != "auto":
        return config.codec
    return "planes" if roster.hosts > 1 else "raw"


def _trim_payload_bytes(config: Config, route: Route) -> int:
    """What a switch may leave of a payload on the way; 0 where there is none."""
    return 0 if is_loopback(route.address) else trimmed_payload_bytes(config.trim_bytes)


def _group_path(config: Config, roster: Roster) -> _native.PeerSettings | None:
    """The path to all that hear our multicast: what the least of them grants."""
    multicast = roster.multicast
    if not multicast.members:
        return None
    cards = [roster.cards[member] for member in multicast.members]
    return _native.PeerSettings(
        min(card.window_bytes for card in cards),
        min(card.pool_bytes for card in cards),
        multicast.payload_bytes,
        _trim_payload_bytes(config, Route(multicast.interface, multicast.payload_bytes)),
        paced=not is_loopback(multicast.interface),
    )


def _receive_trimmed(lanes: list[_native.UdpLane]) -> str:
    """Receive also what a switch trims without correcting its lengths; what to say of it."""
    try:
        for lane in lanes:
            lane.receive_trimmed()
    except RuntimeError as error:  # std::system_error
        return (
            f"; packets that a switch trims without correcting their lengths are not received ({error}): "
            "if yours does that, grant CAP_NET_RAW"
        )
    return "; packets that a switch trims without correcting their lengths are received too"


def _describe(config: Config, roster: Roster, rank: int, coding: str, buffer_bytes: int) -> str:
    sizes = {route.payload_bytes for peer, route in enumerate(roster.routes) if peer != rank}
    settings = ", ".join(f"{field.name}={getattr(config, field.name)!r}" for field in fields(config))
    return (
        f"{len(roster.cards)} ranks on {roster.hosts} host{'s' * (roster.hosts > 1)}, {coding}, "
        f"packets of at most {' or '.join(map(str, sorted(sizes))) or 'no'} bytes, "
        f"receive buffer of {buffer_bytes} bytes granted, {roster.multicast.description}; {settings}"
    )


def _check_array(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"allreduce takes a numpy array, not {type(array).__name__}")
    if array.dtype != np.float32:
        raise ConfigError(f"allreduce takes float32, not {array.dtype}; convert with .astype(np.float32)")
    if not array.flags.c_contiguous:
        raise ConfigError("allreduce works in place on contiguous memory; pass np.ascontiguousarray(...)")
    if not array.flags.writeable:
        raise ConfigError("allreduce works in place, but the array is read-only; pass a copy")
    if array.size >= 1 << 32:
        raise ConfigError(
            f"{array.size} coordinates exceed the limit of 2**32 - 1 for one op; split the array"
        )
    return array.reshape(-1)
