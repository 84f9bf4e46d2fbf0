"""A callback that gives any DDP strategy of Lightning to tailcut, and logs what tailcut has cost."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from tailcut.config import Config, configured
from tailcut.lightning.fit import Fit
from tailcut.lightning.strategy import TailcutStrategy
from tailcut.pytorch.attach import Attachment

FIGURES = ("ops", "partial_ops", "lossy_ops", "skipped_steps", "rejoins", "drift")
"""Of ``Stats``, as the metrics ``tailcut/<name>``."""


class TailcutCallback(Callback):
    """With ``TailcutStrategy`` it only logs, and takes no configuration."""

    def __init__(self, config: Config | None = None, **settings: Any) -> None:
        self._config = configured(config, settings)
        self._fit: Fit | None = None
        self.attachment: Attachment | None = None
        """That of the fit under way, or of the last one."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, TailcutStrategy):
            self.attachment = trainer.strategy.attachment
        else:
            self._fit = Fit(trainer, self._config)
            self.attachment = self._fit.attachment

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.attachment is not None and trainer._logger_connector.should_update_logs:
            stats = self.attachment.stats()
            pl_module.log_dict({f"tailcut/{name}": float(getattr(stats, name)) for name in FIGURES})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._fit is not None:
            self._fit.end()
            self._fit = None
