"""Adapters to PyTorch: the only part of tailcut that imports torch.

Importing it makes the backend name "tailcut" known. torch imports it by itself: at the end of ``import
torch`` (2.5 to 2.13), or when the name is first used (from 2.14). Nothing heavy happens here.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tailcut import notices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from tailcut.config import Config
    from tailcut.pytorch.replicas import Replicas
    from tailcut.stats import Stats

NAME = "tailcut"

# The functions import torch, not the module: importing torch calls autoload(), which must be defined by then.


def register() -> None:
    """Make the backend known to torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def autoload() -> None:
    """torch calls this at the end of ``import torch``, which must not fail because of us."""
    try:
        register()
    except Exception as error:
        notices.warn(f"the backend 'tailcut' could not be registered: {error!r}")


def stats_of(process_group: ProcessGroup | None = None) -> Stats:
    """What a process group of this backend has cost so far; the default one if none is given."""
    import torch.distributed as dist

    from tailcut.pytorch.creation import bounded_part

    return bounded_part(process_group or dist.distributed_c10d._get_default_group()).stats()


def attach_replicas(
    model: Module, process_group: ProcessGroup, config: Config | None = None, **settings: Any
) -> Replicas:
    """HSDP: average what FSDP has reduced inside each replica over ``process_group`` (docs/frameworks.md)."""
    from tailcut.pytorch import replicas

    return replicas.attach_replicas(model, process_group, config, **settings)


def _create(options: Any, group_options: Any) -> Any:
    from tailcut.pytorch.creation import create

    return create(options, group_options)


if find_spec("torch") is not None:
    autoload()
