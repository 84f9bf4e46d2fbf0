"""The averaged backward passes of a model: how many there were, their batches, and their buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from tailcut.pytorch.blocks import Bucket

Batch = TypeVar("Batch")


class Passes:
    """One model. The hook of DDP tells it of buckets."""

    def __init__(self) -> None:
        self.step = 0
        """Passes that this rank has begun or skipped: the step that the group is at."""
        self.skipped = 0
        """Of these, those that it did not compute."""
        self.forwards = 0
        """Forward passes of training since the step began."""
        self.form: Sequence[Bucket] = ()
        """The buckets of a pass, in order, once two in a row had the same: DDP rebuilds them after the first.
        It is one object for as long as they are the same."""
        self._left_out = 0  # of the skipped passes: those whose batches are left out
        self._buckets: list[Bucket] = []  # of this pass, so far
        self._before: list[tuple[str | None, tuple[int, ...]]] = []  # the pass before: keys and parameters

    def enter(self, bucket: Bucket, first: bool, last: bool) -> None:
        """A bucket of gradients is about to be averaged."""
        if first:
            self.step += 1
            self.forwards = 0
            self._buckets = []
        self._buckets.append(bucket)
        if last:
            self._learn_form()

    def skip(self) -> None:
        """The others have done a pass without this rank, which has taken its means."""
        self.step += 1
        self.forwards = 0
        self.skipped += 1

    def skip_to(self, step: int) -> None:
        """This rank was given the state of another, which had so many passes behind it."""
        self.skipped += max(0, step - self.step)
        self.step = step
        self.forwards = 0

    def batches(self, loader: Iterable[Batch], per_step: int) -> Iterator[Batch]:
        """Those of ``loader`` without the batches of passes that were skipped."""
        left_out = 0  # of the pass that is being left out
        for batch in loader:
            if self._left_out < self.skipped:
                left_out += 1
                if left_out == per_step:
                    self._left_out, left_out = self._left_out + 1, 0
                continue
            yield batch

    def forget_form(self) -> None:
        """It is to be learned anew: the training state was copied from another rank."""
        self.form, self._before = (), []

    def _learn_form(self) -> None:
        form = [(bucket.key, tuple(map(id, bucket.parameters))) for bucket in self._buckets]
        if form != self._before:
            self.form, self._before = (), form
        elif not self.form:
            self.form = tuple(self._buckets)
