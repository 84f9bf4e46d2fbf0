"""How a rank that is further behind than the window comes back: with the state of the others.

Owns the attempts, and what is said of them. It blocks only this rank, between two passes. docs/resync.md
explains it.
"""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tailcut import notices
from tailcut.engine.ops import Ops
from tailcut.engine.state import Fetch, State
from tailcut.errors import PeerError, TailcutError
from tailcut.group import Group
from tailcut.pytorch.donor import Donor, Request
from tailcut.pytorch.image import Head, check, load
from tailcut.pytorch.resync import Replica
from tailcut.pytorch.transfer import Outcome, Transfer
from tailcut.stats import with_unit

ATTEMPTS = 3
"""Donors may die while they are asked. A later attempt asks all ranks anew, for a later step."""

LIMIT_DEADLINES = 6
"""So many deadlines without a word from anybody, or without a copy: the others are gone, or stand still."""

SLICE_S = 0.005
"""The longest single wait."""

_log = logging.getLogger(__name__)


class Rejoin:
    """One rank: what it does for others that rejoin, and what it does to rejoin itself."""

    def __init__(self, group: Group, state: State) -> None:
        self._ops = group._ops
        self._state = state
        self._rank = group.rank
        self._others = [other for other in range(group.world_size) if other != group.rank]
        self._limit_s = LIMIT_DEADLINES * group.config.deadline_s
        self._donor = Donor(state)
        self._attempts = 0
        self._last_words: list[Fetch] = []
        self._stood_at = -1  # how far behind this rank was when the others stood still
        self._failure: Exception | None = None  # of a copy; the next forward pass raises it
        self.rejoins = 0
        self.rejoined_bytes = 0

    # ---- for others

    def donate(self, replica: Replica, step: int) -> None:
        """A pass begins. Whoever wants to rejoin may get a copy of the state."""
        try:
            self._donor.begin_pass(replica, step, self._ops.seqs, time.monotonic())
        except Exception as error:  # what a hook raises would break DDP
            self._failure = error

    def raise_failure(self) -> None:
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise TailcutError(
                "copying the state for another rank failed; rejoin=False turns it off"
            ) from error

    # ---- for this rank

    def run(self, replica: Replica, why: str, *, within_s: float | None = None) -> int | None:
        """Load a state of the others, and contribute again from where it is on. Returns how many steps it has
        behind it; None if the others stand still, so that there is nothing to go on from. With ``within_s``
        there is another way: None also if they do not begin to bring a copy so soon."""
        if self._ops.behind_ops == self._stood_at:
            self._ops.ledger.note("went on alone")
            return None
        began_s = time.monotonic()
        self._say(f"{why}: it asks the others for their state")
        for _ in range(ATTEMPTS):
            transfer, outcome = self._attempt(replica, within_s or self._limit_s)
            head = transfer.head
            if head is None and within_s is not None:
                return None
            within_s = None  # this rank is at the ops of the copy now, and there is no other way
            if head is None and outcome is Outcome.STALLED:
                self._stood_at = self._ops.behind_ops
                self._say("goes on alone, because the others take no steps; it asks again when they do")
                self._ops.ledger.note("went on alone")
                return None
            if outcome is Outcome.ALONE:
                break
            assert head is not None
            if outcome is Outcome.COMPLETE:
                load(replica, head, transfer.image)
                self._finish(head, transfer, time.monotonic() - began_s)
                return head.step - 1
            self._say(f"has lost the donors of step {head.step}: it asks again")
        raise PeerError(
            f"rank {self._rank} {why} and cannot rejoin: of ranks {', '.join(map(str, self._others))} "
            + (
                f"nobody has answered for {self._limit_s:.3g} s: they are gone, or have ended"
                if outcome is Outcome.ALONE
                else f"nobody has stayed until a copy was complete, in {ATTEMPTS} attempts"
            )
            + "; restart it from a checkpoint, with its group"
        )

    def resynced(self, ddp: DistributedDataParallel) -> None:
        """All replicas were made equal. Every rank calls it, and all enter the same ops next."""
        skip_together(self._ops, ddp)
        self._stood_at = -1

    def _finish(self, head: Head, transfer: Transfer, took_s: float) -> None:
        self._ops.rejoined()
        parts_from = [transfer.brought[part] for part in range(head.parts)]
        self._ops.ledger.note(
            "rejoin",
            step=head.step - 1,
            seqs=head.seqs,
            head_from=transfer.head_from,
            parts_from=parts_from,
        )
        self._stood_at = -1
        self.rejoins += 1
        self.rejoined_bytes += head.image_bytes
        brought = sorted(set(parts_from))
        donors = f"rank{'s' * (len(brought) > 1)} {', '.join(map(str, brought))}"
        self._say(
            f"goes on at step {head.step}: {with_unit(head.image_bytes)} from {donors} in {took_s:.2f} s"
        )

    def _attempt(self, replica: Replica, head_limit_s: float) -> tuple[Transfer, Outcome]:
        self._attempts += 1
        request = Request(self._rank, self._attempts)

        def accept(head: Head) -> bool:
            check(head, replica, len(self._ops.lanes))
            if not self._ops.can_skip_to(head.seqs):
                return False  # a donor that is itself behind what this rank has heard of
            self._ops.skip_to(head.seqs)  # from now on, what the others send for these ops is kept
            return True

        limits_s = (head_limit_s, self._limit_s)
        transfer = Transfer(self._state, request, self._others, accept, *limits_s, time.monotonic())
        try:
            outcome = Outcome.UNDER_WAY
            while outcome is Outcome.UNDER_WAY:
                self._ops.hear_epochs()  # means of ops in an epoch that it does not know are refused
                transfer.wait(SLICE_S)
                outcome = transfer.advance(time.monotonic(), self._ops.behind_ops)
            return transfer, outcome
        finally:
            self._last_words = [self._state.fetch(rank, request.done, 0) for rank in transfer.heard]

    def _say(self, text: str) -> None:
        notices.say(_log, f"tailcut: rank {self._rank} {text}")


def skip_together(ops: Ops, ddp: DistributedDataParallel) -> None:
    """All ranks call it, and enter the same ops next."""
    seqs = torch.tensor(ops.seqs, device=ddp.device)
    dist.all_reduce(seqs, dist.ReduceOp.MAX, ddp.process_group)
    ops.skip_to(seqs.tolist())
