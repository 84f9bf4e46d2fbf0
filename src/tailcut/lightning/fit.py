"""One fit of a Trainer through tailcut: attaches, keeps its loop in step with the others, closes.

Lightning broadcasts in every batch whether rank 0 has received SIGTERM, and one rank that stops would stop
all in that. It calls what stands here instead. Owns what is replaced in the trainer, and puts it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import LRSchedulerConfig

from tailcut.config import Config
from tailcut.lightning.sigterm import SigtermWatch
from tailcut.pytorch.attach import attach
from tailcut.pytorch.startup import store_of
from tailcut.pytorch.unwrapping import ddp_of, optimizer_of


class Fit:
    """One fit. The strategy has set up the model and the optimizers."""

    def __init__(self, trainer: Trainer, config: Config | None) -> None:
        self._trainer = trainer
        strategy: Any = trainer.strategy
        self._optimizers = [optimizer_of(optimizer) for optimizer in strategy.optimizers]
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._left_out = 0  # of the skipped steps: those whose batches were left out
        self.attachment = attach(
            strategy.model,
            config,
            self._optimizers or None,
            scaler=self._scaler,
            step=self._step if self._optimizers else None,
        )
        self._sigterm: SigtermWatch | None = None
        self._restore: list[Callable[[], None]] = []
        if self.attachment.enabled:
            process_group = ddp_of(strategy.model).process_group
            self._sigterm = SigtermWatch(store_of(process_group), process_group.group_name)
            self._replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._before_batch)
            self._replace(trainer._signal_connector, "_sigterm_notifier_fn", self._on_sigterm)
            self._replace(strategy, "lightning_module_state_dict", self._state_for_checkpoint)

    def finish(self) -> None:
        """Training has ended well. Who is done waits here for those who are behind, and all become equal."""
        if self.attachment.enabled:
            self.attachment.resync()

    def end(self) -> None:
        """The trainer is as it was, and the other ranks are told goodbye."""
        if self._sigterm is not None:
            self._sigterm.close()
        self.attachment.close()
        while self._restore:
            self._restore.pop()()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let this one object have another method, for as long as the fit lasts."""
        setattr(owner, name, function)
        self._restore.append(lambda: delattr(owner, name))

    def _before_batch(self) -> None:
        assert self._sigterm is not None
        if self._sigterm.received:
            raise SIGTERMException
        skipped = self.attachment._passes.skipped
        if skipped > self._left_out:
            self._leave_out_batches(skipped)

    def _leave_out_batches(self, skipped: int) -> None:
        """Be at the batch of the others, after this rank has skipped steps."""
        fetcher: Any = self._trainer.fit_loop._data_fetcher
        while self._left_out < skipped and not fetcher.done:
            for _ in range(self._trainer.accumulate_grad_batches):
                if not fetcher.done:
                    next(fetcher)
            self._left_out += 1
        if fetcher.done:
            self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
            raise StopIteration  # which ends the epoch

    def _on_sigterm(self, number: int, _: Any) -> None:
        """Lightning would broadcast here, which waits for all ranks inside a signal handler."""
        connector, launcher = self._trainer._signal_connector, self._trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(number)
        connector.received_sigterm = True
        if self._sigterm is not None:
            self._sigterm.tell()

    def _state_for_checkpoint(self) -> dict[str, Any]:
        """Every rank gives its state for a checkpoint, and one saves it: they must be equal."""
        self.attachment.before_checkpoint()
        strategy = self._trainer.strategy
        state: dict[str, Any] = type(strategy).lightning_module_state_dict(strategy)
        return state

    def _step(self) -> None:
        """What Lightning does between backward and zero_grad, for a step that this rank skips."""
        trainer = self._trainer
        for optimizer in self._optimizers:
            if trainer.gradient_clip_val:
                if self._scaler is not None:
                    self._scaler.unscale_(optimizer)
                trainer.precision_plugin.clip_gradients(
                    optimizer,
                    trainer.gradient_clip_val,
                    trainer.gradient_clip_algorithm,
                )
            if self._scaler is None:
                optimizer.step()
            else:
                self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()
        self._count_step()

    def _count_step(self) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and _is_due(config, self._trainer.global_step + 1):
                config.scheduler.step()
        progress = loop.automatic_optimization.optim_progress.optimizer.step
        progress.total.completed += 1
        progress.current.completed += 1


def _is_due(config: LRSchedulerConfig, step: int) -> bool:
    return not config.reduce_on_plateau and step % config.frequency == 0
