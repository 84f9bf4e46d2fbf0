"""DDP as Lightning runs it, with its gradients through tailcut."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from tailcut.config import Config
from tailcut.lightning.fit import Fit
from tailcut.pytorch.attach import Attachment


class TailcutStrategy(DDPStrategy):
    """Takes the options of ``DDPStrategy`` beside the configuration of tailcut."""

    def __init__(self, config: Config | None = None, **ddp_options: Any) -> None:
        super().__init__(**ddp_options)
        self._config = config
        self._fit: Fit | None = None

    @property
    def attachment(self) -> Attachment | None:
        """That of the fit under way, or of the last one."""
        return self._fit.attachment if self._fit else None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._fit = Fit(trainer, self._config)

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._fit is not None:
            self._fit.finish()

    def teardown(self) -> None:
        if self._fit is not None:
            self._fit.end()
        super().teardown()
