"""Rolling resync: block by block, a replica is compared with the owners of its blocks and corrected.

Owns the turns of the blocks, which all ranks take alike, and the thread that compares. A step is one averaged
backward pass: in its first bucket all ranks have the parameters of the same step. docs/resync.md explains it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from tailcut.engine.ops import Ops
from tailcut.engine.state import State
from tailcut.errors import TailcutError
from tailcut.pytorch.blocks import Block, Bucket, Segment, cut, elementwise, segments
from tailcut.pytorch.comparison import Comparison, SetAside
from tailcut.pytorch.correction import Correction, apply
from tailcut.pytorch.drift import words_of
from tailcut.pytorch.passes import Passes
from tailcut.pytorch.thread import start
from tailcut.pytorch.turns import URGENT_STEPS, Turns

COPIED_BYTES = 0.02
"""Of each coordinate in a step: what copying blocks in turns takes at most. It is 2 % of what ops send with
four planes, half a byte in each stage. Ranks may choose more planes, but turns must be alike."""

SPREAD_STEPS = 8
"""A wish for that is for so many steps later: it travels with fingerprints, which take a few."""

MOST_WAITING = 8
"""Steps whose copies wait for the thread. If it does not keep up, blocks miss their turn."""


class _Copied(NamedTuple):
    step: int
    blocks: Sequence[SetAside]
    done: Sequence[torch.cuda.Event]
    """When they have happened, the copies are made."""


class _Restart:
    """All replicas have been made equal."""


class _Recut:
    """The blocks are others from now on."""


class RollingResync:
    """One replica. The hook of DDP tells it of buckets, and its module of forward passes."""

    def __init__(
        self,
        ops: Ops,
        state: State,
        optimizer: torch.optim.Optimizer | None,
        passes: Passes,
        *,
        rank: int,
        ranks: int,
        seed: int,
        bound: float,
    ) -> None:
        self._ops = ops
        self._optimizer = optimizer
        self._passes = passes
        self._rank = rank
        self._ranks = ranks
        self._seed = seed
        self._bound = bound
        self._form: Sequence[Bucket] = ()  # what the blocks are cut from
        self._blocks: list[Block] = []
        self._epoch = 0  # whose owners the blocks have
        self._turns = Turns([], 0)  # of the blocks
        self._valid_from = 0  # corrections of earlier steps are void
        self._corrected: dict[Block, int] = {}  # when; copies up to then do not have it
        self._corrections: deque[Correction] = deque()
        self._failure: Exception | None = None  # the next forward pass raises it
        self.resynced_blocks = 0
        self.resynced_bytes = 0
        self._comparison = Comparison(state, rank, ranks, seed)
        self._work: queue.SimpleQueue[_Copied | _Restart | _Recut | None] = queue.SimpleQueue()
        self._thread = start("tailcut-resync", self._work, RollingResync._handle, self)

    def restart(self) -> None:
        """All replicas are equal, and all ranks call this at the same step."""
        self._valid_from = self._passes.step + 1
        self._corrections.clear()
        self._corrected.clear()
        self._form, self._blocks = (), []  # the form of the state may be another one on this rank now
        self._comparison.drift = 0.0
        self._work.put(_Restart())

    def close(self) -> None:
        self._work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def drift(self) -> float:
        """The estimated norm of the difference to the owners, relative to that of the parameters."""
        return self._comparison.drift

    # ---- in the hook of DDP

    def enter(self, first: bool, last: bool) -> None:
        """A bucket of gradients is about to be averaged. Nothing of the model changes meanwhile."""
        try:
            if first:
                self._follow_owners()
                copied = self._set_aside()
                if copied.blocks or self._comparison.under_way:
                    self._work.put(copied)
            if last and self._passes.form is not self._form:
                self._form = self._passes.form
                self._cut()
        except Exception as error:  # what a hook raises would break DDP
            self._failure = error

    def _follow_owners(self) -> None:
        """Cut anew when the last pass was in another epoch. That is alike on all ranks that were in it."""
        if self._ops.epoch == self._epoch:
            return
        self._epoch, self._form, self._blocks = self._ops.epoch, (), []
        self._work.put(_Recut())

    def _cut(self) -> None:
        """Cut the buckets of a pass into blocks."""
        self._blocks = cut(
            self._form, self._ranks, self._seed, self._ops.number_of, self._ops.weights_of(self._epoch)
        )
        if not self._blocks:
            return
        names = max(
            len(list(elementwise(parameter, self._optimizer)))
            for bucket in self._form
            for parameter in bucket.parameters
        )
        costs_bytes = [4 * block.count * names + 8 * words_of(names) for block in self._blocks]
        coordinates = sum(block.count for block in self._blocks)
        self._turns = Turns(costs_bytes, int(COPIED_BYTES * coordinates))

    def _set_aside(self) -> _Copied:
        """Copies of the blocks whose turn it is. They are the same on all ranks."""
        chosen = self._chosen() if self._blocks and self._work.qsize() <= MOST_WAITING else {}
        asides = []
        for block, offered in chosen.items():
            copies = [s._replace(values=s.values.clone()) for s in segments(block, self._optimizer)]
            if copies:
                asides.append(SetAside(block, copies, offered))
            if offered and block.owner != self._rank:  # what the owner has applied comes with its copy
                self._ops.forget(block.key, block.first, block.count)
        return _Copied(self._passes.step, asides, _events(copy for aside in asides for copy in aside.copies))

    def _chosen(self) -> dict[Block, bool]:
        """Which blocks are compared, and whether they are copied where they differ."""
        turns, step = self._turns, self._passes.step
        copied = {*turns.copied(step), *turns.all_soon(self._comparison.wish, step)}
        compared = copied.union(turns.compared(step))
        return {self._blocks[index]: index in copied for index in sorted(compared)}

    # ---- in the thread

    def _handle(self, work: _Copied | _Restart | _Recut) -> None:
        try:
            if isinstance(work, _Restart):
                self._comparison.restart()
            elif isinstance(work, _Recut):
                self._comparison.forget_measured()
            elif work.step >= self._valid_from:
                self._compare(work)
        except Exception as error:
            self._failure = error

    def _compare(self, copied: _Copied) -> None:
        for event in copied.done:
            event.synchronize()
        comparison = self._comparison
        corrections = comparison.compare(copied.step)
        self._corrections.extend(corrections)
        # Half of the bound, because it grows until it has been corrected.
        if comparison.drift > self._bound / 2 and copied.step > comparison.wish + URGENT_STEPS + SPREAD_STEPS:
            comparison.wish = copied.step + SPREAD_STEPS
        if copied.blocks:
            comparison.begin(copied.step, [_on_host(aside) for aside in copied.blocks])

    # ---- before a forward pass

    def correct(self) -> None:
        """Apply what has come. Nothing of the model is in use."""
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise TailcutError("comparing the replicas failed; drift_bound=0 turns it off") from error
        if self._corrections:
            self._apply()

    # Under torch.compile it would be compiled for the form of every block. torch.optim marks what it does not
    # want compiled in the same way; the public torch.compiler.disable imports the compiler at once.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _apply(self) -> None:
        while self._corrections:
            correction = self._corrections.popleft()
            corrected_at = self._corrected.get(correction.block, 0)
            if correction.step <= max(corrected_at, self._valid_from - 1):
                continue
            step = self._passes.step
            if apply(correction, self._optimizer, step - correction.step + 1):
                self._corrected[correction.block] = step
                block = correction.block
                self._ops.ledger.note(
                    "correction",
                    step=step,
                    forward=self._passes.forwards,
                    of_step=correction.step,
                    key=block.key,
                    first=block.first,
                    count=block.count,
                    owner=block.owner,
                )
                self.resynced_blocks += 1
                self.resynced_bytes += sum(segment.values.nbytes for segment in correction.own)


def _on_host(aside: SetAside) -> SetAside:
    return replace(aside, copies=[copy._replace(values=copy.values.cpu()) for copy in aside.copies])


def _events(copies: Iterable[Segment]) -> list[torch.cuda.Event]:
    """That the copies are made, on each device that makes them."""
    events = []
    for device in {copy.values.device for copy in copies if copy.values.is_cuda}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
