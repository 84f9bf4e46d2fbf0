"""Sends the gradient buckets of DDP through tailcut: a communication hook, and the object that stands for it.

Owns what a training script uses: figures, state, the end. Touches only the gradients of DDP.
"""
# Annotations are not postponed here: DDP compares those of its hook with the classes.

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from tailcut import notices
from tailcut.config import Config, configured
from tailcut.errors import ConfigError
from tailcut.group import Group
from tailcut.policy.budget import EXCESS
from tailcut.pytorch.blocks import Bucket
from tailcut.pytorch.demands import check_gradients, check_scaler, fitting, warn_of_what_blocks
from tailcut.pytorch.reducer import Reducer
from tailcut.pytorch.reliable import ReliableParameters
from tailcut.pytorch.resync import Replica, copy_from
from tailcut.pytorch.rolling import RollingResync
from tailcut.pytorch.scaling import Scaling
from tailcut.pytorch.startup import announce, attachment_name, disabled, open_group, store_of, sum_up
from tailcut.report import Report
from tailcut.stats import Stats


def attach(
    ddp: DistributedDataParallel,
    config: Config | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    on_over_budget: Callable[[Stats], None] | None = None,
    scaler: Any = None,
    **settings: Any,
) -> "Attachment":
    """Average the gradients of ``ddp`` through tailcut from now on. Every rank calls it, before any step.

    ``settings`` are fields of ``Config``, such as ``deadline_s=5``; they come before those of ``config``. If
    ``optimizer`` is given, its state is kept equal too (docs/resync.md). If the loss is scaled, ``scaler`` is
    the ``torch.amp.GradScaler``: what is late is carried at the right scale and not into a step that was
    skipped, and ``Attachment.resync`` copies the scale. ``on_over_budget`` is called when gradients have cost
    more than ``config.budget`` for a hundred buckets in a row. Another thread calls it while backward waits,
    and backward raises what it raises.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"attach takes a DistributedDataParallel model, not {type(ddp).__name__}; "
            "attach before torch.compile, and for HSDP use the backend 'tailcut'"
        )
    if disabled():
        return Attachment(ddp, None, optimizer, scaler)
    check_gradients(ddp)
    check_scaler(scaler)
    config = fitting(configured(config, settings), ddp)
    process_group = ddp.process_group
    group = open_group(
        store_of(process_group),
        attachment_name(process_group),
        process_group.rank(),
        process_group.size(),
        config,
        on_over_budget,
    )
    attachment = Attachment(ddp, group, optimizer, scaler)
    try:
        ddp.register_comm_hook(attachment, average_bucket)
    except BaseException:
        attachment.close(linger_s=0.0)
        raise
    if process_group.rank() == 0:
        announce(group, f"gradients of {type(ddp.module).__name__}")
        warn_of_what_blocks(ddp)
        for pattern in attachment._reliable.unmatched:
            notices.warn(f"tailcut: reliable={pattern!r} matches the name of no parameter")
    return attachment


class Attachment:
    """The gradients of one DDP model. A context manager: leaving it closes the group."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        group: Group | None,
        optimizer: torch.optim.Optimizer | None,
        scaler: Any = None,
    ) -> None:
        # A weak reference: the model holds its hook in C++, where the collector does not see the cycle.
        self._ddp: weakref.ref[DistributedDataParallel] | None = weakref.ref(ddp)
        self._optimizer = optimizer
        self._scaler = scaler
        self._scaling: Scaling | None = None
        self._resynced_bytes = 0
        self._earlier: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._attached_at = notices.users_place()
        self._step_error = self._step_coordinates = 0.0  # since the last should_step()
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        self._reliable = ReliableParameters(self._names, group.config.reliable if group else ())
        self._reducer: Reducer | None = None
        self._carries = False
        if group is not None:
            self._carries = group.config.late == "carry" and group._ops.state is not None  # not in a grid
            farewell = partial(sum_up, self._totals) if group.rank == 0 else None
            if scaler is not None:
                self._scaling = Scaling(scaler, optimizer, group.config.window_ops)
            self._reducer = Reducer(group, self._listen, farewell)
        self._rolling = self._roll(ddp) if group is not None else None
        self.reports: deque[Report] = deque(maxlen=group.config.window_ops if group else 0)
        """The reports of the latest ops, in order. One op is one bucket."""

    @property
    def enabled(self) -> bool:
        """Whether gradients go through tailcut: not with ``TAILCUT_DISABLE=1``, nor in a pickled copy."""
        return self._reducer is not None

    @property
    def config(self) -> Config | None:
        """The effective configuration."""
        return self._reducer.group.config if self._reducer else None

    def stats(self) -> Stats:
        """The totals, with those of the runs before a checkpoint."""
        now = self._reducer.stats() if self._reducer else Stats()
        return self._with_drift(now).plus(self._earlier)

    def _totals(self) -> Stats:
        """Those of this run, for other eyes than the user's."""
        return self._with_drift(self._reducer.group.stats() if self._reducer else Stats())

    def _with_drift(self, stats: Stats) -> Stats:
        rolling = self._rolling
        stats.resynced_bytes = self._resynced_bytes
        if rolling is not None:
            stats.drift = rolling.drift
            stats.resynced_blocks = rolling.resynced_blocks
            stats.resynced_bytes += rolling.resynced_bytes
        return stats

    @property
    def lr_scale(self) -> float:
        """1/(1 + ε), the same on all ranks after the same backward pass. A learning rate that is multiplied
        by it keeps the noise that the optimizer sees as it was (docs/budget.md)."""
        return self._reducer.group.lr_scale if self._reducer else 1.0

    def should_step(self) -> bool:
        """Whether the gradients since the last call have kept the budget on all ranks. All get one answer.

        It is for loops that skip whole steps: ``if attachment.should_step(): optimizer.step()``. Every rank
        calls it. It uses DDP's own process group, so it is reliable and waits for every rank.
        """
        if self._reducer is None:
            return True
        spent = self._step_error / max(1.0, self._step_coordinates)
        self._step_error = self._step_coordinates = 0.0
        ddp = self._model()
        kept = spent <= EXCESS * self._reducer.group.config.budget
        vote = torch.tensor([kept], dtype=torch.int32, device=next(ddp.parameters()).device)
        torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, ddp.process_group)
        return bool(vote.item())

    def _model(self) -> DistributedDataParallel:
        ddp = self._ddp() if self._ddp else None
        if ddp is None:
            raise ConfigError(
                "this attachment has no model: it was pickled, or the model is gone; attach again"
            )
        return ddp

    def resync(self, source: int = 0) -> None:
        """Make all replicas equal to that of rank ``source``, bit for bit: parameters, buffers, optimizer
        state, loss scale. Only what differs is copied.

        Every rank calls it. It uses DDP's own process group, so it is reliable and waits for every rank.
        """
        replica = Replica(self._model(), self._optimizer, self._scaler)
        step = self._rolling.step if self._rolling else 0
        copied_bytes, step = copy_from(source, replica, step)
        self._resynced_bytes += copied_bytes
        if self._rolling is not None:
            self._rolling.restart(step)
        if self._scaling is not None:
            self._scaling.restart()
        if self._reducer:
            self._reducer.group.resynced()

    def before_checkpoint(self) -> None:
        """Make all replicas equal, so that a checkpoint of any rank is one of all. Every rank calls it, also
        if only one then saves: ``attachment.before_checkpoint(); torch.save(...)``. Who skips it saves a
        replica that may differ from the others by ``stats().drift``."""
        self.resync()

    def close(self, linger_s: float | None = None) -> None:
        """Say goodbye to the other ranks and average nothing more. The end of the process does it too."""
        if self._reducer:
            self._reducer.close(linger_s)

    def state_dict(self) -> dict[str, Any]:
        """The counts so far, for a checkpoint."""
        return self._totals().plus(self._earlier).counts()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts of a checkpoint."""
        self._earlier = dict(state)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(linger_s=None if kind is None else 0.0)

    def __getstate__(self) -> dict[str, Any]:
        # torch.save(ddp) pickles its hooks. Sockets, threads and the model are left out.
        return {"_earlier": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._ddp = self._optimizer = self._scaler = self._scaling = self._reducer = self._rolling = None
        self._resynced_bytes = 0
        self.reports = deque(maxlen=0)

    def _roll(self, ddp: DistributedDataParallel) -> RollingResync | None:
        """Begin rolling resync, if it is wanted and the group can."""
        assert self._reducer is not None
        group = self._reducer.group
        state = group._ops.state
        if state is None or group.world_size == 1 or group.config.drift_bound == 0:
            return None
        rolling = RollingResync(
            group._ops,
            state,
            self._optimizer,
            rank=group.rank,
            ranks=group.world_size,
            seed=group.config.seed,
            codec=group.codec,
            bound=group.config.drift_bound,
        )
        self._reducer.companion = rolling
        ddp.register_forward_pre_hook(self._before_forward)
        return rolling

    def _before_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._rolling is not None:
            self._rolling.correct()

    def _listen(self, report: Report) -> None:
        self.reports.append(report)
        self._step_error += report.epsilon.total * report.length
        self._step_coordinates += report.length
        if self._scaling is not None:
            self._scaling.listen(report)
        if report.split_verdicts:
            self._warn_once(
                f"tailcut: {report}: another rank skipped a step for an Inf or a NaN that this one applied; "
                "replicas and loss scales differ until attachment.resync(); stats() keeps count"
            )
        if self._carries and report.key is not None:
            return  # what did not come in time follows
        if report.gather.missing:
            self._warn_once(
                f"tailcut: {report}: a part of the mean did not come in time, and replicas that have it "
                "differ from this one until attachment.resync(); stats() keeps count"
            )
        elif report.lost_frac:
            self._warn_once(
                f"tailcut: {report}: nobody has that part of the mean, and the gradient is zero there; "
                "stats() keeps count"
            )

    def _warn_once(self, text: str) -> None:
        kind = text.split(":")[-1]
        if kind not in self._warned:
            self._warned.add(kind)
            notices.warn(text, self._attached_at)


def average_bucket(attachment: Attachment, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook of DDP. It returns at once. When the future completes, the bucket holds the mean."""
    assert attachment._reducer is not None
    # DDP rebuilds its buckets after the first step, so an index would then mean another bucket.
    parameters = bucket.parameters()
    key = attachment._names.get(parameters[0])
    first = bucket.index() == 0
    if attachment._rolling is not None:
        attachment._rolling.enter(Bucket(key, tuple(parameters)), first, bucket.is_last())
    scaling, loss_scale = attachment._scaling, 0.0
    if scaling is not None:
        if first:
            attachment._reducer.group.skipped(scaling.begin_pass())
        loss_scale = scaling.loss_scale
    reliable = attachment._reliable.runs(parameters)
    return attachment._reducer.average(bucket.buffer(), key, reliable=reliable, loss_scale=loss_scale).future
