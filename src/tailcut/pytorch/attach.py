"""Sends the gradient buckets of DDP through tailcut: a communication hook, and the object that stands for it.

Owns what a training script uses: figures, state, the end. Touches only the gradients of DDP.
"""
# Annotations are not postponed here: DDP compares those of its hook with the classes.

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from tailcut import notices
from tailcut.config import Config, configured
from tailcut.errors import ConfigError
from tailcut.group import Group
from tailcut.ledger.writer import NO_LEDGER
from tailcut.policy.budget import EXCESS
from tailcut.pytorch.absence import Absence
from tailcut.pytorch.blocks import Bucket
from tailcut.pytorch.catch_up import CatchUp
from tailcut.pytorch.demands import check_gradients, check_scaler, fitting, warn_of_what_blocks
from tailcut.pytorch.following import Following
from tailcut.pytorch.passes import Passes
from tailcut.pytorch.reducer import Reducer
from tailcut.pytorch.rejoin import Rejoin
from tailcut.pytorch.reliable import ReliableParameters
from tailcut.pytorch.replayed import ReplayedCorrections, ReplayedRejoin
from tailcut.pytorch.resync import Replica, copy_from, hash_of_all
from tailcut.pytorch.rolling import RollingResync
from tailcut.pytorch.scaling import Scaling
from tailcut.pytorch.stalls import StallWatch
from tailcut.pytorch.startup import announce, attachment_name, disabled, open_group, store_of, sum_up
from tailcut.pytorch.together import each_of, one_of
from tailcut.pytorch.unwrapping import ddp_of
from tailcut.report import Report
from tailcut.stats import Stats

Batch = TypeVar("Batch")

FINGERPRINT_STEPS = 100
"""So often the parameters are hashed for the ledger, which reads all of them once."""


def attach(
    ddp: torch.nn.Module,
    config: Config | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    on_over_budget: Callable[[Stats], None] | None = None,
    scaler: Any = None,
    step: Callable[[], object] | None = None,
    **settings: Any,
) -> "Attachment":
    """Average the gradients of a DDP model through tailcut from now on. Every rank calls it, before any step.
    ``ddp`` may also be what torch.compile, Fabric or Accelerate have made of it.

    ``settings`` are fields of ``Config``, such as ``deadline_s=5``; they come before those of ``config``. If
    ``optimizer`` is given, one or several, its state is kept equal too (docs/resync.md). If the loss is
    scaled, ``scaler`` is the ``torch.amp.GradScaler``: what is late is carried at the right scale and not
    into a step that was skipped, and ``Attachment.resync`` copies the scale. ``on_over_budget`` is called
    when gradients have cost more than ``config.budget`` for a hundred buckets in a row. Another thread calls
    it while backward waits, and backward raises what it raises.

    With ``optimizer`` a rank that is whole steps behind does not compute them, but takes their means
    (docs/pytorch.md). ``step`` is then called for each: it does all that stands between backward and
    zero_grad, such as unscaling, clipping, the step and the scheduler. The default is ``optimizer.step()``,
    or with a scaler ``scaler.step(optimizer)`` and ``scaler.update()``.
    """
    model, optimizer = ddp_of(ddp), one_of(optimizer)
    if step is not None and optimizer is None:
        raise ConfigError(
            "step= is for steps that this rank skips, which it does with optimizer= only; pass both"
        )
    if disabled():
        return Attachment(model, None, optimizer, scaler, step)
    check_gradients(model)
    check_scaler(scaler)
    config = fitting(configured(config, settings), model, each_of(optimizer))
    process_group = model.process_group
    group = open_group(
        store_of(process_group),
        attachment_name(process_group),
        process_group.rank(),
        process_group.size(),
        config,
        on_over_budget,
    )
    attachment = Attachment(model, group, optimizer, scaler, step)
    try:
        model.register_comm_hook(attachment, average_bucket)
    except BaseException:
        attachment.close(linger_s=0.0)
        raise
    if process_group.rank() == 0:
        announce(group, f"gradients of {type(model.module).__name__}")
        warn_of_what_blocks(model)
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
        step: Callable[[], object] | None = None,
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
        self._passes = Passes()
        self._absence: Absence | None = None
        if group is not None:
            self._absence = Absence(group._ops, self._passes)
            ddp.module.register_forward_pre_hook(self._absence)
        self._rolling = self._roll() if group is not None else None
        self._rejoin = self._rejoining() if group is not None else None
        self._catch_up: CatchUp | None = None
        if group is not None and optimizer is not None:
            take_step = step or partial(_step, optimizer, scaler)
            self._catch_up = CatchUp(
                group, self._passes, optimizer, take_step, self._begin_pass, self._listen
            )
        self._following: Following | None = None
        if self._reducer is not None:
            self._following = Following(
                self._reducer,
                self._passes,
                self._catch_up,
                self._rejoin,
                self._replica,
                self._restart,
                self._warn_once,
                may_choose=step is None and not (group and (group.config.ledger or group.config.replay)),
            )
        self._stalls: StallWatch | None = None
        if self._reducer is not None and self._reducer.group.world_size > 1:
            self._stalls = StallWatch(self._reducer.group.config.deadline_s, self._warn_once)
            self._reducer.companions.append(self._stalls)
        ddp.register_forward_pre_hook(self._before_forward)
        self.reports: deque[Report] = deque(maxlen=_kept_reports(group.config.window_ops) if group else 0)
        """The reports of the latest ops, in order. One op is one bucket."""

    @property
    def enabled(self) -> bool:
        """Whether gradients go through tailcut: not with ``TAILCUT_DISABLE=1``, nor in a pickled copy."""
        return self._reducer is not None

    @property
    def config(self) -> Config | None:
        """The effective configuration."""
        return self._reducer.group.config if self._reducer else None

    @property
    def step(self) -> int:
        """The group's step: averaged backward passes that this rank has begun, or skipped because the others
        had done them. For loops that count: ``while attachment.step < total``."""
        return self._passes.step

    def batches(self, loader: Iterable[Batch], per_step: int = 1) -> Iterator[Batch]:
        """The batches of ``loader`` without those of steps that this rank has skipped, so that it is at the
        same batch as the others. The batch at which it found itself behind was drawn before, and is used.

        ``per_step`` is how many batches a step takes. What the end of the loader leaves over is left out of
        the next one.
        """
        return self._passes.batches(loader, per_step)

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
        stats.skipped_steps = self._passes.skipped
        if rolling is not None:
            stats.drift = rolling.drift
            stats.resynced_blocks = rolling.resynced_blocks
            stats.resynced_bytes += rolling.resynced_bytes
        if self._stalls is not None:
            stats.outside_stalls, stats.outside_stalled_s = self._stalls.stalls, self._stalls.stalled_s
        if self._rejoin is not None:
            stats.rejoins, stats.rejoined_bytes = self._rejoin.rejoins, self._rejoin.rejoined_bytes
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
        copied_bytes, self._passes.step = copy_from(source, self._replica(), self._passes.step)
        self._passes.forget_form()
        self._resynced_bytes += copied_bytes
        self._restart()
        if self._reducer:
            ledger = self._reducer.group._ops.ledger
            ledger.note("resync", step=self._passes.step, source=source, copied_bytes=copied_bytes)
            if self._rejoin is not None:
                self._rejoin.resynced(self._model())
            self._reducer.behind = None
            self._reducer.group.resynced()

    def away(self) -> AbstractContextManager[None]:
        """The others do not wait for this rank meanwhile: ``with attachment.away(): torch.save(...)``. An
        evaluation needs no such word: a forward pass in eval mode without gradients is one."""
        return self._absence.lasting() if self._absence else nullcontext()

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
        self._catch_up = self._rejoin = self._following = self._stalls = self._absence = None
        self._passes = Passes()
        self._resynced_bytes = 0
        self.reports = deque(maxlen=0)

    def _replica(self) -> Replica:
        return Replica(self._model(), self._optimizer, self._scaler)

    def _restart(self) -> None:
        """This replica was given the state of another: nothing that was under way is of use."""
        if self._rolling is not None:
            self._rolling.restart()
        if self._scaling is not None:
            self._scaling.restart()

    def _roll(self) -> RollingResync | ReplayedCorrections | None:
        """Begin rolling resync, if it is wanted and the group can."""
        assert self._reducer is not None
        group = self._reducer.group
        state = group._ops.state
        if state is None or group.world_size == 1 or group.config.drift_bound == 0:
            return None
        if (playback := group._ops.playback) is not None:
            return ReplayedCorrections(playback, self._optimizer, self._passes)
        rolling = RollingResync(
            group._ops,
            state,
            self._optimizer,
            self._passes,
            rank=group.rank,
            ranks=group.world_size,
            seed=group.config.seed,
            bound=group.config.drift_bound,
        )
        self._reducer.companions.append(rolling)
        return rolling

    def _rejoining(self) -> Rejoin | ReplayedRejoin | None:
        """What lets ranks rejoin, if it is wanted and can be done."""
        assert self._reducer is not None
        group = self._reducer.group
        state = group._ops.state
        if state is None or group.world_size == 1 or self._optimizer is None or not group.config.rejoin:
            return None
        if (playback := group._ops.playback) is not None:
            return ReplayedRejoin(playback, group._ops)
        return Rejoin(group, state)

    # Under torch.compile, counts that change with every pass would make it compile anew.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before_forward(self, ddp: DistributedDataParallel, inputs: tuple[Any, ...]) -> None:
        if self._reducer is None:  # TAILCUT_DISABLE=1: there is no hook that counts
            self._passes.step += ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync
            return
        if self._stalls is not None:
            self._stalls.enter()
        if self._absence is not None and torch.is_grad_enabled():
            self._absence.end()
        if ddp.training and torch.is_grad_enabled():
            self._passes.forwards += 1
            if self._rolling is not None:
                self._rolling.correct()
        if self._following is not None:
            self._following.before_forward(ddp)

    def _begin_pass(self) -> float:
        """A pass begins, computed or skipped. Returns its loss scale; 0 is none."""
        if self._scaling is None:
            return 0.0
        assert self._reducer is not None
        self._reducer.group.skipped(self._scaling.begin_pass())
        return self._scaling.loss_scale

    def _share_state(self, first: bool, last: bool) -> None:
        """A bucket is about to be averaged. Nothing of the model changes meanwhile."""
        if self._rolling is not None:
            self._rolling.enter(first, last)
        if self._rejoin is not None and first:
            self._rejoin.donate(self._replica(), self._passes.step)

    def _note_fingerprint(self) -> None:
        """What the parameters are, every so often, in the ledger."""
        ledger = self._reducer.group._ops.ledger if self._reducer else NO_LEDGER
        if ledger.keeps and self._passes.step % FINGERPRINT_STEPS == 1:
            ledger.note("parameters", step=self._passes.step, hash=f"{hash_of_all(self._names):016x}")

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
    first, last = bucket.index() == 0, bucket.is_last()
    attachment._passes.enter(Bucket(key, tuple(parameters)), first, last)
    if attachment._reducer.behind is None:
        attachment._share_state(first, last)
    if first:
        attachment._note_fingerprint()
    if attachment._catch_up is not None and last:
        attachment._catch_up.note_pass()
    if first:
        attachment._begin_pass()
    loss_scale = attachment._scaling.loss_scale if attachment._scaling else 0.0
    reliable = attachment._reliable.runs(parameters)
    return attachment._reducer.average(bucket.buffer(), key, reliable=reliable, loss_scale=loss_scale).future


def _step(optimizer: Any, scaler: Any) -> None:
    """What stands between backward and zero_grad, if the user does not say."""
    if scaler is None:
        optimizer.step()
    else:
        for one in each_of(optimizer):
            scaler.step(one)
        scaler.update()


def _kept_reports(window_ops: int) -> int:
    """Those of a few steps: the window has those of many."""
    return max(64, window_ops // 64)
