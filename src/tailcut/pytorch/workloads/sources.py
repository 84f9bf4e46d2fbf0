"""Reads what workloads learn from: MNIST's idx files, scikit-learn's digits, any text. Knows no models."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tailcut.errors import ConfigError

IMAGE_PLACES = ("", "fashion-mnist", "FashionMNIST/raw")
"""Where Fashion-MNIST's four files may lie in a directory of data; the last is torchvision's."""
TEXT_PLACES = ("", "input.txt", "tinyshakespeare/input.txt")
TRAINING_DIGITS = 1437


@dataclass(frozen=True)
class Images:
    """Square grey images, 0 to 255, and their classes."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, places: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels from -1 to 1 in one channel, and classes."""
        return self.pixels[places].float().div(127.5).sub(1.0).unsqueeze(1), self.labels[places]


def fashion_mnist(data: Path) -> tuple[Images, Images]:
    """Images for training and for testing, of 28 x 28 pixels."""
    for place in IMAGE_PLACES:
        if _idx_file(data / place, "train-images-idx3-ubyte"):
            return _read_idx(data / place, "train"), _read_idx(data / place, "t10k")
    raise ConfigError(
        f"there is no train-images-idx3-ubyte.gz in {data}, nor in its {' or '.join(IMAGE_PLACES[1:])}: "
        "name the directory of Fashion-MNIST's four files"
    )


def digits(size: int) -> tuple[Images, Images]:
    """Scikit-learn's digits, which come with its wheel, enlarged to size x size pixels."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(
            "scikit-learn's digits need scikit-learn: pip install 'tailcut[demo]', or name other data"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))  # the file is sorted by writer
    images = torch.tensor(pixels[order], dtype=torch.float32).reshape(-1, 1, 8, 8) * (255 / 16)
    large = nn.functional.interpolate(images, (size, size), mode="bilinear").squeeze(1)
    classes = torch.tensor(labels[order])
    split = TRAINING_DIGITS
    return Images(large[:split], classes[:split]), Images(large[split:], classes[split:])


def text(data: Path) -> torch.Tensor:
    """The bytes of a text: a file, or tiny-shakespeare's in a directory of data."""
    for place in TEXT_PLACES:
        if (file := data / place).is_file():
            return codes(file.read_bytes())
    raise ConfigError(f"{data} is no text file and has no {' or '.join(TEXT_PLACES[1:])}: name a text file")


def python_text() -> torch.Tensor:
    """What help() shows, which comes with every Python."""
    from pydoc_data.topics import topics

    return codes("\n".join(topics.values()).encode())


def codes(content: bytes) -> torch.Tensor:
    return torch.tensor(np.frombuffer(content, np.uint8)).long()


def _read_idx(directory: Path, part: str) -> Images:
    """Images follow a header of 16 bytes, labels one of 8."""
    pixels = _content(directory, f"{part}-images-idx3-ubyte")
    labels = _content(directory, f"{part}-labels-idx1-ubyte")
    return Images(
        torch.tensor(np.frombuffer(pixels, np.uint8, offset=16)).reshape(-1, 28, 28),
        torch.tensor(np.frombuffer(labels, np.uint8, offset=8)).long(),
    )


def _content(directory: Path, name: str) -> bytes:
    file = _idx_file(directory, name)
    if file is None:
        raise ConfigError(f"{directory} has no {name} and no {name}.gz")
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def _idx_file(directory: Path, name: str) -> Path | None:
    candidates = (directory / f"{name}.gz", directory / name)
    return next((file for file in candidates if file.is_file()), None)
