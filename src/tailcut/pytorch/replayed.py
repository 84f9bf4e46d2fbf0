"""What a replay does where a run compares replicas, corrects them and lets ranks rejoin: the same at the same
steps, by the notes of the ledgers. States are computed again, so that ranks hand each other what they copied
then (docs/ledger.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from tailcut.engine.ops import Ops
from tailcut.errors import ReplayError
from tailcut.pytorch.blocks import Block, Bucket, Segment, block_of, segments
from tailcut.pytorch.comparison import bytes_of, from_bytes
from tailcut.pytorch.correction import Correction, apply
from tailcut.pytorch.image import PART_BYTES, check, head_of, load, parts_of, read_head
from tailcut.pytorch.passes import Passes
from tailcut.pytorch.rejoin import skip_together
from tailcut.pytorch.resync import Replica
from tailcut.replay.playback import Playback

Noted = Mapping[str, Any]


class ReplayedCorrections:
    """In place of RollingResync: blocks are corrected when they were."""

    drift = 0.0

    def __init__(self, playback: Playback, optimizer: torch.optim.Optimizer | None, passes: Passes) -> None:
        self._playback = playback
        self._optimizer = optimizer
        self._passes = passes
        self._form: Sequence[Bucket] = ()
        self._due = deque(noted for _, noted in playback.notes("correction")[playback.rank])
        self._own: dict[str, tuple[Block, list[Segment]]] = {}  # copies that are to be corrected
        self._copied: dict[int, list[tuple[int, Noted]]] = {}  # by step: for whom, and what
        for rank, notes in playback.notes("correction").items():
            for _, noted in notes:
                if playback.rank in (rank, noted["owner"]):
                    self._copied.setdefault(noted["of_step"], []).append((rank, noted))
        self.resynced_blocks = 0
        self.resynced_bytes = 0

    def enter(self, first: bool, last: bool) -> None:
        """A bucket of gradients is about to be averaged."""
        if first:
            for rank, noted in self._copied.pop(self._passes.step, []):
                self._copy(rank, noted)
        if last:
            self._form = self._passes.form

    def _copy(self, rank: int, noted: Noted) -> None:
        bucket = next(bucket for bucket in self._form if bucket.key == noted["key"])
        block = block_of(bucket, noted["first"], noted["count"], noted["owner"])
        copies = [s._replace(values=s.values.clone()) for s in segments(block, self._optimizer)]
        if rank == self._playback.rank:
            self._own[_name_of(noted)] = (block, copies)
        else:
            self._playback.give_copy(_name_of(noted), rank, bytes_of(copies).cpu().numpy().tobytes())

    def correct(self) -> None:
        """Apply what was applied before this forward pass."""
        place = (self._passes.step, self._passes.forwards)
        while self._due and (self._due[0]["step"], self._due[0]["forward"]) <= place:
            noted = self._due.popleft()
            if (noted["step"], noted["forward"]) != place:
                raise ReplayError(
                    f"a block was corrected before forward pass {noted['forward']} of step {noted['step']}, "
                    "which the replay has not done: the script does other passes than those recorded"
                )
            self._apply(noted)

    def _apply(self, noted: Noted) -> None:
        block, own = self._own.pop(_name_of(noted))
        blob = np.frombuffer(bytearray(self._playback.copy(_name_of(noted), noted["owner"])), np.uint8)
        owners = from_bytes(blob, own)
        steps = noted["step"] - noted["of_step"] + 1
        if owners is None or not apply(
            Correction(block, noted["of_step"], own, owners), self._optimizer, steps
        ):
            raise ReplayError(
                f"the state of step {noted['of_step']} has another form than the one that was recorded; the "
                "optimizer is another one"
            )
        self.resynced_blocks += 1
        self.resynced_bytes += sum(segment.values.nbytes for segment in own)

    def restart(self) -> None:
        """This replica was given the state of another."""
        self._form = ()

    def close(self) -> None:
        pass


def _name_of(noted: Noted) -> str:
    return f"block {noted['first']} of {noted['key']} at step {noted['of_step']}"


class ReplayedRejoin:
    """In place of Rejoin: a rank is given the state that it was given, by the same donors."""

    def __init__(self, playback: Playback, ops: Ops) -> None:
        self._playback = playback
        self._ops = ops
        self._outcomes = iter(playback.notes("rejoin", "went on alone")[playback.rank])
        self._given: dict[int, list[tuple[int, Noted]]] = {}  # by step: to whom, and what
        for rank, notes in playback.notes("rejoin").items():
            for _, noted in notes:
                if playback.rank in (noted["head_from"], *noted["parts_from"]):
                    self._given.setdefault(noted["step"] + 1, []).append((rank, noted))
        self.rejoins = 0
        self.rejoined_bytes = 0

    def donate(self, replica: Replica, step: int) -> None:
        """A pass begins."""
        for rank, noted in self._given.pop(step, []):
            for name, blob in self._copies(replica, noted):
                self._playback.give_copy(name, rank, blob)

    def _copies(self, replica: Replica, noted: Noted) -> Iterator[tuple[str, bytes]]:
        step, own = noted["step"] + 1, self._playback.rank
        if noted["head_from"] == own:
            yield _head_at(step), head_of(replica, step, noted["seqs"]).tobytes()
        for index, part in enumerate(parts_of(replica)):
            if noted["parts_from"][index] == own:
                yield _part_at(step, index), part.tobytes()

    def raise_failure(self) -> None:
        pass

    def run(self, replica: Replica, why: str, *, within_s: float | None = None) -> int | None:
        event, noted = next(self._outcomes, ("", {}))
        if event == "went on alone":
            return None
        if not event:
            raise ReplayError(f"this rank {why}, and its ledger ends before it has rejoined: it died there")
        step = noted["step"] + 1
        head = read_head(np.frombuffer(self._playback.copy(_head_at(step), noted["head_from"]), np.uint8))
        check(head, replica, len(self._ops.lanes))
        self._ops.skip_to(head.seqs)
        image = np.empty(head.image_bytes, np.uint8)
        for index, donor in enumerate(noted["parts_from"]):
            part = np.frombuffer(self._playback.copy(_part_at(step, index), donor), np.uint8)
            image[index * PART_BYTES : index * PART_BYTES + len(part)] = part
        load(replica, head, image)
        self._ops.rejoined()
        self.rejoins += 1
        self.rejoined_bytes += head.image_bytes
        return head.step - 1

    def resynced(self, ddp: DistributedDataParallel) -> None:
        skip_together(self._ops, ddp)


def _head_at(step: int) -> str:
    return f"the head of the state at step {step}"


def _part_at(step: int, index: int) -> str:
    return f"part {index} of the state at step {step}"
