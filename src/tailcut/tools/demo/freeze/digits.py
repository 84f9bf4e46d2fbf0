"""The handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels, in a fixed order, split once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tailcut.errors import ConfigError

PIXELS, CLASSES = 64, 10
TRAIN_IMAGES, TEST_IMAGES = 1437, 360

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Digits:
    """Images and labels, for training and for the test. Pixels are between 0 and 1."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels

    def save(self, path: Path) -> None:
        """Write a file for the workers: reading it takes a millisecond, importing scikit-learn a second."""
        np.savez(path, **vars(self))

    @classmethod
    def read(cls, path: Path) -> Digits:
        arrays: Any = np.load(path)
        return cls(**arrays)


def load() -> Digits:
    if find_spec("sklearn") is None or find_spec("torch") is None:
        raise ConfigError(
            "the demo trains a model on the digits of scikit-learn, and torch or scikit-learn is not "
            "installed: pip install 'tailcut[demo]'"
        )
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))  # the file is sorted by writer
    train, test = order[:TRAIN_IMAGES], order[-TEST_IMAGES:]
    images = (pixels / 16).astype(np.float32)
    labels = labels.astype(np.int64)
    return Digits(images[train], labels[train], images[test], labels[test])


def batches(rank: int, ranks: int, batch: int, epochs: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """The images of this rank for every step. An epoch leaves out what does not fill a step of all ranks."""
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(TRAIN_IMAGES)
        for step in range(steps_per_epoch(ranks, batch)):
            first = (step * ranks + rank) * batch
            yield order[first : first + batch]


def steps_per_epoch(ranks: int, batch: int) -> int:
    return TRAIN_IMAGES // (ranks * batch)
