"""One Trainer through tailcut: attaches when it begins to train, keeps its loop in step, closes at the end.

By itself a Trainer gathers numbers from all ranks in every step, and one rank that stops would stop all in
that. It calls what stands here instead. Owns what is replaced in the trainer, and puts it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers import trainer as trainer_module

from tailcut import notices
from tailcut.config import Config, configured
from tailcut.pytorch.attach import Attachment
from tailcut.pytorch.attach import attach as attach_model
from tailcut.pytorch.totals import BoundedMean
from tailcut.pytorch.unwrapping import ddp_of, optimizer_of


def attach(trainer: Trainer, config: Config | None = None, **settings: Any) -> Training:
    """Average the gradients of ``trainer`` through tailcut when it trains. Every rank calls it, before
    ``trainer.train()``. ``settings`` are fields of ``Config``; they come before those of ``config``."""
    training = Training(trainer, configured(config, settings))
    trainer.add_callback(training)
    handler = trainer.accelerator.ddp_handler
    if trainer.args.ddp_find_unused_parameters is None and handler is not None:
        handler.find_unused_parameters = (
            False  # the Trainer's own default would wait for every rank in a step
        )
    if trainer.args.include_num_input_tokens_seen not in (False, "no"):
        notices.warn(
            "tailcut bounds the gradients. A dead or frozen rank still stops the others in the count of "
            "input tokens after every step (include_num_input_tokens_seen='no')"
        )
    return training


class Training(TrainerCallback):
    """What stands between one Trainer and tailcut."""

    def __init__(self, trainer: Trainer, config: Config) -> None:
        self._trainer = trainer
        self._config = config
        self._restore: list[Callable[[], None]] = []
        self._left_out = 0  # of the skipped steps: those whose batches were left out
        self.attachment: Attachment | None = None
        """That of the training under way, or of the last one."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        self._optimizer = optimizer_of(trainer.optimizer)
        self._scaler = trainer.accelerator.scaler
        self._left_out = 0
        self.attachment = attach_model(
            trainer.model_wrapped, self._config, self._optimizer, scaler=self._scaler, step=self._step
        )
        if not self.attachment.enabled:
            return
        process_group = ddp_of(trainer.model_wrapped).process_group
        self._tokens = BoundedMean(process_group, self._config)
        self._losses = BoundedMean(process_group, self._config)
        self._flos = BoundedMean(process_group, self._config)
        self._count_own, self._gather = trainer._get_num_items_in_batch, trainer_module.nested_gather
        self._draw, self._save = trainer.get_batch_samples, trainer._save_checkpoint
        self._replace(trainer, "_get_num_items_in_batch", self._count_tokens)
        self._replace(trainer, "get_batch_samples", self._draw_batches)
        self._replace(trainer, "_save_checkpoint", self._save_equal)
        self._replace(trainer, "store_flos", self._count_flos)
        trainer_module.nested_gather = self._mean_loss
        self._restore.append(lambda: setattr(trainer_module, "nested_gather", self._gather))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Who is done waits here for those who are behind, and all become equal."""
        if self.attachment is None or not self.attachment.enabled:
            return
        self.attachment.resync()
        for group in (self.attachment, self._tokens, self._losses, self._flos):
            group.close()
        while self._restore:
            self._restore.pop()()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let this one object have another method, for as long as it trains."""
        setattr(owner, name, function)
        self._restore.append(lambda: delattr(owner, name))

    def _count_tokens(self, batches: list[Any], device: torch.device) -> Any:
        """The tokens of this step on all ranks. The Trainer gathers them, which waits for every rank."""
        args = self._trainer.args
        across, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        try:
            own = self._count_own(batches, device)
        finally:
            args.average_tokens_across_devices = across
        if own is None or not across:
            return own
        return torch.tensor(round(self._tokens.of(float(own)) * args.world_size), device=device)

    def _mean_loss(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss for the log, which the Trainer gathers."""
        if torch.is_tensor(tensors) and tensors.numel() == 1:
            return torch.full_like(tensors, self._losses.of(float(tensors)))
        return self._gather(tensors, *args, **kwargs)

    def _count_flos(self) -> None:
        """The floating-point operations of all ranks since the last log, which the Trainer gathers too."""
        trainer = self._trainer
        trainer.state.total_flos += self._flos.of(trainer.current_flos) * trainer.args.world_size
        trainer.current_flos = 0

    def _draw_batches(self, batches: Iterator[Any], count: int, device: torch.device) -> Any:
        """Be at the batch of the others, if this rank has skipped steps."""
        assert self.attachment is not None
        while self._left_out < self.attachment._passes.skipped:
            self._left_out += 1
            for _ in range(self._trainer.args.gradient_accumulation_steps):
                next(batches, None)
        return self._draw(batches, count, device)

    def _save_equal(self, *args: Any, **kwargs: Any) -> None:
        assert self.attachment is not None
        self.attachment.before_checkpoint()
        self._save(*args, **kwargs)

    def _step(self) -> None:
        """What the Trainer does between backward and zero_grad, for a step that this rank skips."""
        trainer, scaler = self._trainer, self._scaler
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        if trainer.args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        if scaler is None:
            self._optimizer.step()
        else:
            scaler.step(self._optimizer)
            scaler.update()
        trainer.lr_scheduler.step()
        trainer.state.global_step += 1
