"""Ray Train: figures reported once in many steps, by a thread. Gradients need only ``tailcut.attach``.

``ray.train.report`` waits until every worker has called it, so in the training thread a worker that stops
would stop all of them. Written for Ray Train 2.50 and later. Knows no groups: the caller counts.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import ray.train


class Reporter:
    """Reports every so many steps. Each worker has one, made and closed where the others do that too."""

    def __init__(self, every_steps: int) -> None:
        if every_steps < 1:
            raise ValueError(f"every_steps={every_steps}; report every step (1) or less often")
        self._every_steps = every_steps
        self._reported = 0  # reports that were queued
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tailcut-reports", daemon=True)
        self._thread.start()

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """``step`` steps are done, those included that this worker has skipped (``Attachment.step``).

        Never waits. Ray counts the reports of each worker, so one that has skipped the steps of several
        reports gives its figures to each of them.
        """
        self._raise()
        while self._reported < step // self._every_steps:
            self._reported += 1
            self._queue.put({"step": self._reported * self._every_steps, **metrics})

    def close(self) -> None:
        """Wait until all reports are with Ray, which takes until every worker has come so far.

        What follows, such as a report with a checkpoint, is the training thread's own call again.
        """
        self._queue.put(None)
        self._thread.join()
        self._raise()

    def _run(self) -> None:
        try:
            while (metrics := self._queue.get()) is not None:
                ray.train.report(metrics)
        except BaseException as error:  # also what Ray raises to end a worker: the training thread is to end
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
