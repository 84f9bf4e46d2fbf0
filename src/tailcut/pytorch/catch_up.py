"""Catches up without computing: a rank that is whole steps behind takes their means and steps with them.

Owns the decision whether steps can be skipped, and the gradients of a skipped step. Knows nothing of packets.
docs/pytorch.md explains it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel

from tailcut import notices
from tailcut.group import Group
from tailcut.pytorch.blocks import Bucket, in_memory_order
from tailcut.pytorch.passes import Passes
from tailcut.report import Report

_log = logging.getLogger(__name__)

EPOCH_LIMIT_S = 1.0
"""How long a rank that is behind waits for the store to tell which epochs it has missed."""


class Pace:
    """Whether every averaged pass is followed by one step. The optimizer holds it."""

    def __init__(self) -> None:
        self._unstepped = 0  # averaged passes since the last step
        self._one_each = False  # the last step followed one averaged pass

    def note_pass(self) -> None:
        self._unstepped += 1

    def note_step(self, *_: object) -> None:
        self._one_each = self._unstepped == 1
        self._unstepped = 0

    @property
    def even(self) -> bool:
        return self._one_each and self._unstepped == 0


class CatchUp:
    """One model and its optimizer. ``step`` does all that stands between backward and zero_grad."""

    def __init__(
        self,
        group: Group,
        passes: Passes,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], object],
        begin_pass: Callable[[], float],
        listener: Callable[[Report], None],
    ) -> None:
        self._group = group
        self._passes = passes
        self._begin_pass = begin_pass  # returns the loss scale of the pass; 0 is none
        self._listener = listener
        self._step = step
        self._pace = Pace()
        self._accumulating = False  # a pass without averaging has begun since the last averaged one
        self._most_said = 0
        self.jumped: Report | None = None
        """Of an op beyond the window: the group has gone on without this rank."""
        optimizer.register_step_post_hook(self._pace.note_step)

    def note_pass(self) -> None:
        """All buckets of a pass are on their way."""
        self._accumulating = False
        self._pace.note_pass()

    def due(self, ddp: DistributedDataParallel) -> bool:
        """Whether the forward pass that begins now is the first of a step, and the group has ended that step.
        Who averages several passes for one step computes them all."""
        if not ddp.training or not torch.is_grad_enabled() or ddp._join_config.enable:
            return False
        first = self._pace.even and not self._accumulating
        self._accumulating |= not ddp.require_backward_grad_sync
        return first and self.missed_steps > 0

    @property
    def missed_bytes(self) -> int:
        """What the means of these steps take on their way to this rank."""
        coordinates = sum(_length(bucket) for bucket in self._passes.form)
        return self.missed_steps * coordinates * self._group._ops.mean_bits // 8

    @property
    def missed_steps(self) -> int:
        """The steps that the group has left behind: it has begun a later one."""
        ops = len(self._passes.form)
        return max(0, self._group.behind_ops - 1) // ops if ops else 0

    def catch_up(self) -> bool:
        """Take the means of the steps that the group has done meanwhile, and step with each.

        Returns whether the rank has caught up. If not, some of the means are gone, or the group is beyond the
        window, and only a copy of a peer's state makes this replica equal to the others.
        """
        began_s, before = time.monotonic(), self._passes.skipped
        means = [torch.zeros(_length(bucket)) for bucket in self._passes.form]
        whole = True
        with _borrowed_gradients(self._passes.form):
            while whole and self.missed_steps > 0:
                whole = self._skip_step(means)
        self._pace.note_step()  # also if a GradScaler has left the last one out
        self._say(self._passes.skipped - before, time.monotonic() - began_s)
        return whole

    def _skip_step(self, means: list[torch.Tensor]) -> bool:
        """Do one step with the means of the group. Returns whether all of them have come."""
        self._group._ops.settle_epochs(EPOCH_LIMIT_S)
        form, loss_scale = self._passes.form, self._begin_pass()
        works = [
            self._group.allreduce(mean, bucket.key, loss_scale=loss_scale, contribute=False)
            for bucket, mean in zip(form, means, strict=True)
        ]
        reports = [work.wait() for work in works]
        self.jumped = next((report for report in reports if report.status == "behind"), None)
        if self.jumped is not None:
            return False
        for report in reports:
            self._listener(report)
        for bucket, mean in zip(form, means, strict=True):
            _put(bucket, mean)
        self._passes.skip()
        seqs = [report.seq for report in reports]
        self._group._ops.ledger.note("skipped step", step=self._passes.step, seqs=seqs)
        self._pace.note_pass()
        self._step()
        return all(map(_is_whole, reports))

    def _say(self, steps: int, took_s: float) -> None:
        """Once, and again when it was further behind than ever: a slow rank skips steps all the time."""
        if steps > self._most_said:
            self._most_said = steps
            rank = self._group.rank
            notices.say(
                _log, f"tailcut: rank {rank} was {steps} steps behind: took their means in {took_s:.1f} s"
            )


def _is_whole(report: Report) -> bool:
    """Whether all has come that somebody has. The means of a silent rank are missing everywhere."""
    return not any(link.gather.missing and not link.silent for link in report.links)


def _length(bucket: Bucket) -> int:
    return sum(parameter.numel() for parameter in bucket.parameters)


@contextmanager
def _borrowed_gradients(form: Sequence[Bucket]) -> Iterator[None]:
    """Every parameter has a gradient meanwhile. Afterwards those that had none have none, and others are
    zero: this is what zero_grad leaves, either way."""
    parameters = [parameter for bucket in form for parameter in bucket.parameters]
    without = [parameter for parameter in parameters if parameter.grad is None]
    for parameter in without:
        parameter.grad = torch.empty_like(parameter)
    try:
        yield
    finally:
        for parameter in without:
            parameter.grad = None
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()


@torch.no_grad()
def _put(bucket: Bucket, mean: torch.Tensor) -> None:
    """Make a mean the gradients of its bucket. DDP lays gradients out as the memory of their parameters."""
    at = 0
    for parameter in bucket.parameters:
        values = mean[at : at + parameter.numel()]
        at += parameter.numel()
        assert parameter.grad is not None
        flat = in_memory_order(parameter.grad)
        if flat is None:
            parameter.grad.copy_(values.view(parameter.shape))
        else:
            flat.copy_(values)
