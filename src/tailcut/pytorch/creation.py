"""How torch.distributed gets a process group of the backend "tailcut": one engine, one of two adapters."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroupGloo

from tailcut.config import Config
from tailcut.errors import ConfigError
from tailcut.group import Group
from tailcut.pytorch.bounded import RELEASE, Bounded
from tailcut.pytorch.startup import announce, disabled, open_group, sum_up


def create(options: Any, group_options: Any) -> Any:
    """torch calls this. ``group_options`` is what the user passed as ``pg_options``: a Config, or nothing."""
    if group_options is not None and not isinstance(group_options, Config):
        raise ConfigError(f"pg_options takes a tailcut.Config, not {type(group_options).__name__}")
    store, rank, size = options.store, options.group_rank, options.group_size
    if disabled():
        return ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    # No two process groups at a time have the same name, and all members of one have the same.
    name = f"backend/{options.group_id}"
    group = open_group(store, name, rank, size, careful(group_options or Config()))
    try:
        gloo = inner_gloo(group, store, options.timeout)
        farewell = None
        if (options.global_ranks_in_group or range(size))[rank] == 0:
            announce(group, f"process group {options.group_id or 'default'}")
            farewell = partial(sum_up, group.stats)
        return _adapter()(store, rank, size, gloo, Bounded(group, farewell), options)
    except BaseException:
        group.close(linger_s=0.0)
        raise


def careful(config: Config) -> Config:
    """All planes are sent unless the user sets ``planes`` or ``bound_sums``, which says that the backend is
    for gradients. Otherwise it may be given parameters, which bear no noise."""
    return config if config.planes or config.bound_sums else replace(config, planes=16)


def bounded_part(process_group: Any) -> Bounded:
    """The tailcut half of a process group."""
    part = getattr(process_group, "_bounded", None)
    if part is None:  # torch 2.14 and later
        part = getattr(process_group._get_backend(torch.device("cpu")), "_bounded", None)
    if isinstance(part, Bounded):
        return part
    raise ConfigError("this process group does not go through tailcut; is its backend 'tailcut'?")


def inner_gloo(group: Group, store: Any, timeout: timedelta) -> ProcessGroupGloo:
    """Gloo with the address and the tag that the ranks of the tailcut group have agreed on.

    By itself Gloo takes the host name, on Debian often 127.0.1.1, and believes what an earlier start left.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=group.local_address)]
    options._timeout = timeout
    own_store = PrefixStore(f"gloo/{group.tag:016x}", store)
    return ProcessGroupGloo(own_store, group.rank, group.world_size, options)


def _adapter() -> Any:
    if RELEASE >= (2, 14):
        from tailcut.pytorch.backend import TailcutBackend

        return TailcutBackend
    from tailcut.pytorch.process_group import TailcutProcessGroup

    return TailcutProcessGroup
