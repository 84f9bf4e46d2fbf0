"""DDP's gradient buckets through tailcut: one communication hook, and the object that stands for it.

Owns what a training script holds on to: figures, state, the end. Nothing of DDP but its gradients is touched.
"""
# No postponed annotations: DDP compares those of its hook with the classes.

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from tailcut import notices
from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.group import Group
from tailcut.policy.budget import EXCESS
from tailcut.pytorch.reducer import Reducer
from tailcut.pytorch.resync import copy_from
from tailcut.pytorch.staging import DTYPES
from tailcut.pytorch.startup import announce, attachment_name, disabled, open_group, store_of, sum_up
from tailcut.report import Report
from tailcut.stats import Stats

STEPS_IN_WINDOW = 4
"""How many steps of buckets the window holds at least: a rank may be late by a backward pass or two."""

POOLED_BUCKETS = 4
"""How many of the largest bucket the pool holds at least: an op is served when twice its bucket fits."""


def attach(
    ddp: DistributedDataParallel,
    config: Config | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    on_over_budget: Callable[[Stats], None] | None = None,
) -> "Attachment":
    """Average the gradients of ``ddp`` through tailcut from now on. Every rank calls it, before any step.

    With ``optimizer``, ``Attachment.resync`` copies its state too. ``on_over_budget`` is called, in another
    thread while backward waits, when gradients have cost more than ``config.budget`` for a hundred buckets in
    a row; what it raises, backward raises.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"attach takes a DistributedDataParallel model, not {type(ddp).__name__}; "
            "attach before torch.compile, and for HSDP use the backend 'tailcut'"
        )
    if disabled():
        return Attachment(ddp, None, optimizer)
    _check_gradients(ddp)
    config = _fitting(config or Config(), ddp)
    process_group = ddp.process_group
    group = open_group(
        store_of(process_group),
        attachment_name(process_group),
        process_group.rank(),
        process_group.size(),
        config,
        on_over_budget,
    )
    attachment = Attachment(ddp, group, optimizer)
    try:
        ddp.register_comm_hook(attachment, average_bucket)
    except BaseException:
        attachment.close(linger_s=0.0)
        raise
    if process_group.rank() == 0:
        announce(group, f"gradients of {type(ddp.module).__name__}")
        _warn_of_what_blocks(ddp)
    return attachment


class Attachment:
    """The gradients of one DDP model. A context manager: leaving it closes the group."""

    def __init__(
        self, ddp: DistributedDataParallel, group: Group | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        # Weak: the model holds its hook in C++, where the collector does not see the circle.
        self._ddp: weakref.ref[DistributedDataParallel] | None = weakref.ref(ddp)
        self._optimizer = optimizer
        self._earlier: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._attached_at = notices.users_place()
        self._step_error = self._step_coordinates = 0.0  # since the last should_step()
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        self._reducer: Reducer | None = None
        if group is not None:
            farewell = partial(sum_up, group) if group.rank == 0 else None
            self._reducer = Reducer(group, self._listen, farewell)
        self.reports: deque[Report] = deque(maxlen=group.config.window_ops if group else 0)
        """Of the latest ops, in order; one op is one bucket."""

    @property
    def enabled(self) -> bool:
        """False with ``TAILCUT_DISABLE=1``, and for a copy that was pickled: then DDP does it all itself."""
        return self._reducer is not None

    @property
    def config(self) -> Config | None:
        """The effective configuration."""
        return self._reducer.group.config if self._reducer else None

    def stats(self) -> Stats:
        """Totals, those of before a checkpoint included."""
        now = self._reducer.stats() if self._reducer else Stats()
        return now.plus(self._earlier)

    @property
    def lr_scale(self) -> float:
        """1/(1 + ε), the same on all ranks after the same backward: multiply the learning rate by it, if you
        like, to keep what the optimizer sees of noise as it was (docs/budget.md)."""
        return self._reducer.group.lr_scale if self._reducer else 1.0

    def should_step(self) -> bool:
        """Whether the gradients since the last call have kept the budget on every rank; all get one answer.

        For loops that skip whole steps: ``if attachment.should_step(): optimizer.step()``. Every rank calls
        it. Reliable, through DDP's own process group: it waits for everybody.
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
        """Make all replicas equal to that of rank ``source``: parameters, buffers, optimizer state.

        Every rank calls it. Reliable, through DDP's own process group: it waits for everybody.
        """
        copy_from(source, self._model(), self._optimizer)
        if self._reducer:
            self._reducer.group.resynced()

    def close(self, linger_s: float | None = None) -> None:
        """Say goodbye to the other ranks; gradients cannot be averaged any more. Exit does it too."""
        if self._reducer:
            self._reducer.close(linger_s)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the counts so far."""
        now = self._reducer.group.stats() if self._reducer else Stats()
        return now.plus(self._earlier).counts()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from those of a checkpoint."""
        self._earlier = dict(state)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(linger_s=None if kind is None else 0.0)

    def __getstate__(self) -> dict[str, Any]:
        # torch.save(ddp) pickles its hooks; sockets, threads and the model stay behind.
        return {"_earlier": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._ddp = self._optimizer = self._reducer = None
        self.reports = deque(maxlen=0)

    def _listen(self, report: Report) -> None:
        self.reports.append(report)
        self._step_error += report.epsilon.total * report.length
        self._step_coordinates += report.length
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
    """DDP's hook. Returns at once; the future holds the mean, already in the bucket."""
    assert attachment._reducer is not None
    # Buckets are rebuilt after the first step, so an index would mean another bucket then.
    key = attachment._names.get(bucket.parameters()[0])
    return attachment._reducer.average(bucket.buffer(), key).future


def _check_gradients(ddp: DistributedDataParallel) -> None:
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:
            raise ConfigError(
                f"the gradients of {name} are {parameter.dtype}, and tailcut averages in float32: "
                "convert the model with .float(), or leave this one to DDP"
            )
    for name, module in ddp.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(
            module, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            raise ConfigError(
                f"{name} has sparse gradients, which tailcut does not average: set sparse=False"
            )
    if getattr(ddp, "_use_python_reducer", False):
        raise ConfigError(
            "torch._dynamo.config.optimize_ddp='python_reducer' reduces parameter by parameter inside the "
            "compiled graph; tailcut needs DDP's buckets: set it to 'ddp_optimizer'"
        )


def _fitting(config: Config, ddp: DistributedDataParallel) -> Config:
    """The configuration with room for the steps and buckets of this model, whatever it says."""
    parameters: list[torch.nn.Parameter] = [p for p in ddp.module.parameters() if p.requires_grad]
    # A bucket is closed when it reaches its cap; one may be open for each dtype, and the first is small.
    cap_bytes = max(1, int(ddp.bucket_bytes_cap))  # 0 is allowed: a bucket for every parameter
    gradient_bytes = sum(p.numel() * p.element_size() for p in parameters)
    buckets = min(len(parameters), gradient_bytes // cap_bytes + len({p.dtype for p in parameters}) + 1)
    bucket_bytes = cap_bytes + max((4 * p.numel() for p in parameters), default=0)
    return replace(
        config,
        window_ops=max(config.window_ops, STEPS_IN_WINDOW * buckets),
        pool_bytes=max(config.pool_bytes, POOLED_BUCKETS * bucket_bytes),
    )


def _warn_of_what_blocks(ddp: DistributedDataParallel) -> None:
    """What DDP and its modules send by themselves still waits for every rank."""
    blocking = []
    if ddp.broadcast_buffers and ddp.modules_buffers:
        switch = "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"
        blocking.append(f"the broadcast of buffers before every forward pass ({switch}=False)")
    if ddp.find_unused_parameters and not ddp.static_graph:
        blocking.append("the map of used parameters (find_unused_parameters=False, or static_graph=True)")
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in ddp.module.modules()):
        blocking.append("the statistics of SyncBatchNorm (BatchNorm, or a norm without statistics)")
    if blocking:
        notices.warn(
            "tailcut bounds the gradients. A dead or frozen rank still stops the others in: "
            + "; ".join(blocking)
        )
