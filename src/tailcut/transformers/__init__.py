"""Transformers: one call between ``Trainer(...)`` and ``trainer.train()``. Written for Transformers 5.

Accelerate needs no adapter: ``tailcut.attach`` takes what ``accelerator.prepare`` returns.
docs/frameworks.md says what is bounded.
"""

from tailcut.transformers.training import Training, attach

__all__ = ["Training", "attach"]
