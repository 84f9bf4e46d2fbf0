"""Classifiers of images: a strided CNN, an MLP, a small ResNet with BatchNorm."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tailcut.pytorch.workloads.sources import Images, digits, fashion_mnist
from tailcut.pytorch.workloads.workload import Workload

CLASSES = 10
EVALUATED_IMAGES = 1000
"""The standard error of an accuracy of 85 % is then 1.1 points, the same images for all."""
EVALUATION_BATCH = 50
"""Larger batches take longer per image, because their activations leave the caches."""


class Classifier(Workload):
    """Learns images by SGD with momentum."""

    def __init__(
        self,
        name: str,
        build: Callable[[], nn.Module],
        images: tuple[Images, Images],
        source: str,
        *,
        batch: int,
        target: float,
        learning_rate: float = 0.05,
    ) -> None:
        self.name, self.source, self.batch, self.target = name, source, batch, target
        self._build = build
        self._training, self._test = images
        self._learning_rate = learning_rate

    def model(self) -> nn.Module:
        return self._build()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), self._learning_rate, momentum=0.9)

    def examples(self) -> int:
        return len(self._training)

    def loss(self, network: nn.Module, places: torch.Tensor) -> torch.Tensor:
        pixels, labels = self._training[places]
        return nn.functional.cross_entropy(network(pixels), labels)

    def figure_of(self, model: nn.Module, whole: bool) -> float:
        images = len(self._test) if whole else min(EVALUATED_IMAGES, len(self._test))
        right = 0
        for start in range(0, images, EVALUATION_BATCH):
            pixels, labels = self._test[slice(start, min(images, start + EVALUATION_BATCH))]
            right += int((model(pixels).argmax(1) == labels).sum())
        return right / images


def cnn(data: Path | None) -> Workload:
    """Strides instead of pooling: as many parameters as a CNN that pools, at a third of its computing."""
    images, source, target = _large_images(data, 0.82)
    return Classifier("cnn", _cnn, images, source, batch=128, target=target)


def mlp(data: Path | None) -> Workload:
    """Always digits, which are always there."""
    return Classifier("mlp", _mlp, digits(8), "scikit-learn's digits", batch=64, target=0.95)


def resnet(data: Path | None) -> Workload:
    images, source, target = _large_images(data, 0.82)
    return Classifier("resnet", _resnet, images, source, batch=128, target=target)


def _large_images(data: Path | None, target: float) -> tuple[tuple[Images, Images], str, float]:
    if data is None:
        return digits(28), "scikit-learn's digits, enlarged", 0.95
    return fashion_mnist(data), "Fashion-MNIST", target


def _cnn() -> nn.Module:
    """1.59 million parameters: 6.4 MB of gradients."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(3136, 500), nn.ReLU(), nn.Linear(500, CLASSES)),
    )


def _mlp() -> nn.Module:
    """1.03 million parameters."""
    linear = [nn.Linear(*widths) for widths in itertools.pairwise((64, 700, 700, 700, CLASSES))]
    between = [module for layer in linear for module in (layer, nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *between[:-1])


def _resnet() -> nn.Module:
    """0.7 million parameters in three residual blocks."""
    return nn.Sequential(
        *(_convolution(1, 32, 2), nn.ReLU()),
        *(_Residual(32, 32, 1), _Residual(32, 64, 2), _Residual(64, 128, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)),
    )


def _convolution(channels: int, after: int, stride: int, size: int = 3) -> nn.Module:
    convolution = nn.Conv2d(channels, after, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


class _Residual(nn.Module):
    def __init__(self, channels: int, after: int, stride: int) -> None:
        super().__init__()
        self._first = _convolution(channels, after, stride)
        self._second = _convolution(after, after, 1)
        same = channels == after and stride == 1
        self._around = nn.Identity() if same else _convolution(channels, after, stride, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        inner = self._second(nn.functional.relu(self._first(image)))
        return nn.functional.relu(inner + self._around(image))
