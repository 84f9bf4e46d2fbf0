"""HSDP by hooks: FSDP shards the model inside each replica, and tailcut averages its gradients across them.

The other way is a mesh with the backend "tailcut" in its replicate dimension. With hooks a bucket has a key,
the name of its module, so that what is late is carried. docs/frameworks.md has both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tailcut.config import Config, configured
from tailcut.errors import ConfigError
from tailcut.pytorch.reducer import Reducer
from tailcut.pytorch.startup import announce, attachment_name, disabled, open_group, store_of, sum_up
from tailcut.stats import Stats


def attach_replicas(
    model: torch.nn.Module, process_group: dist.ProcessGroup, config: Config | None = None, **settings: Any
) -> Replicas:
    """Average the gradients of a model over ``process_group``, which has the ranks with the same shard.

    ``fully_shard`` was given a mesh of one dimension, that of the shards. Every rank calls this, before any
    step. ``settings`` are fields of ``Config``; they come before those of ``config``.
    """
    sharded = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ConfigError(f"no module of this {type(model).__name__} is sharded; call fully_shard first")
    for name, module in sharded:
        if any(group._is_hsdp for group in module._get_fsdp_state()._fsdp_param_groups):
            raise ConfigError(
                f"{name or type(model).__name__} is sharded over a mesh that replicates too, so torch "
                "averages the replicas; shard over mesh['shard'], or give the mesh "
                "backend_override={'replicate': 'tailcut'}"
            )
    replicas = Replicas(process_group, configured(config, settings))
    for name, module in sharded:
        module.set_all_reduce_hook(partial(replicas.average, name or "root"))
    return replicas


class Replicas:
    """The gradients of one model across its replicas."""

    def __init__(self, process_group: dist.ProcessGroup, config: Config) -> None:
        self._process_group = process_group
        self._reducer: Reducer | None = None
        if disabled():
            return
        rank, size = process_group.rank(), process_group.size()
        group = open_group(store_of(process_group), attachment_name(process_group), rank, size, config)
        farewell = None
        if dist.get_rank() == 0:
            announce(group, "gradients across replicas")
            farewell = partial(sum_up, group.stats)
        self._reducer = Reducer(group, farewell=farewell)

    def average(self, key: str, gradients: torch.Tensor) -> None:
        """The hook of FSDP. When it returns, ``gradients`` are the mean."""
        if self._reducer is None:
            dist.all_reduce(gradients, group=self._process_group)
            gradients.div_(self._process_group.size())
        elif gradients.numel():
            self._reducer.average(gradients, key).future.wait()

    def stats(self) -> Stats:
        """What it has cost so far."""
        return self._reducer.stats() if self._reducer else Stats()

    def close(self) -> None:
        """Say goodbye to the other replicas. The end of the process does it too."""
        if self._reducer is not None:
            self._reducer.close()
