"""What races train: models with their optimizer, batches, figure of merit and target, by name."""

from __future__ import annotations

from pathlib import Path

from tailcut.errors import ConfigError
from tailcut.pytorch.workloads import language, vision
from tailcut.pytorch.workloads.workload import Facts, Workload

__all__ = ["NAMES", "Facts", "Workload", "load"]

NAMES = ("cnn", "mlp", "resnet", "gpt", "gpt-finetuned")


def load(name: str, data: Path | None = None, checkpoint: Path | None = None) -> Workload:
    """A workload. ``data`` is a directory or a text; without it, the workload takes what is always there."""
    match name:
        case "cnn":
            return vision.cnn(data)
        case "mlp":
            return vision.mlp(data)
        case "resnet":
            return vision.resnet(data)
        case "gpt":
            return language.gpt(data)
        case "gpt-finetuned":
            return language.gpt_finetuned(data, checkpoint)
    raise ConfigError(f"there is no workload {name!r}; there are {', '.join(NAMES)}")
