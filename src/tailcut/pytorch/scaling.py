"""What a GradScaler means for what is carried: the loss scale of a backward pass, and steps it has skipped.

Knows the scaler, the steps of the optimizer and the reports of the passes. Knows nothing of DDP or of groups.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from tailcut.report import Report


class Scaling:
    """Follows a ``torch.amp.GradScaler``. The scale is read once in a pass, since it waits for the device."""

    def __init__(self, scaler: Any, optimizer: torch.optim.Optimizer | None, window_ops: int) -> None:
        self._scaler = scaler
        self._optimizer_is_known = optimizer is not None
        # A fused optimizer is called for every step and skips it on its device. torch asks for this name too.
        self._skips_when_called = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.loss_scale = 0.0
        """Of this pass; 0 is none."""
        self._since_step: deque[Report] = deque(maxlen=window_ops)
        self._before_step: deque[Report] = deque(maxlen=window_ops)  # between the last two steps
        if optimizer is not None:
            optimizer.register_step_post_hook(self._stepped)

    def begin_pass(self) -> list[Report]:
        """A backward pass begins. Returns the ops whose results were not applied, for an Inf or a NaN."""
        scale = float(self._scaler.get_scale()) if self._scaler.is_enabled() else 0.0
        skipped: list[Report] = []
        if 0 < scale < self.loss_scale:
            skipped = list(self._before_step if self._skips_when_called else self._since_step)
        if skipped or not self._optimizer_is_known:
            self._since_step.clear()
        self.loss_scale = scale
        return skipped

    def listen(self, report: Report) -> None:
        """An op of this pass has ended."""
        self._since_step.append(report)

    def restart(self) -> None:
        """All replicas and scalers were made equal: nothing is pending, and the scale may be another."""
        self.loss_scale = 0.0
        self._since_step.clear()
        self._before_step.clear()

    def _stepped(self, *_: object) -> None:
        self._before_step, self._since_step = self._since_step, deque(maxlen=self._since_step.maxlen)
