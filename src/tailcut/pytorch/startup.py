"""How the tailcut group of a process group begins and ends: its store, its name, and what rank 0 says."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import cast

import torch.distributed as dist

from tailcut import __version__, notices
from tailcut.config import Config, flag
from tailcut.errors import ConfigError
from tailcut.group import Group
from tailcut.stats import Stats
from tailcut.store import Store

_log = logging.getLogger(__name__)
_attachments: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_announced: set[str] = set()


def disabled() -> bool:
    """Whether ``TAILCUT_DISABLE=1`` is set. Then everything goes through Gloo, without tailcut."""
    text = os.environ.get("TAILCUT_DISABLE") or "0"
    try:
        return flag(text)
    except ValueError:
        raise ConfigError(f"TAILCUT_DISABLE={text!r} is neither 0 nor 1") from None


def store_of(process_group: dist.ProcessGroup) -> Store:
    """The store that the ranks of a process group share."""
    return cast(Store, dist.distributed_c10d._get_process_group_store(process_group))


def open_group(
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    config: Config,
    on_over_budget: Callable[[Stats], None] | None = None,
) -> Group:
    """Open a tailcut group for a process group. Each member makes the ``name`` by itself, and all must make
    the same. So it may depend on the process group, but not on what else a member takes part in."""
    # After an elastic restart the store is the same, and so are the names of its process groups.
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Group(rank, world_size, store, config, name=f"{name}/{life}", on_over_budget=on_over_budget)


def attachment_name(process_group: dist.ProcessGroup) -> str:
    """The name for the next model on a process group. Its members attach models in the same order."""
    number = _attachments.get(process_group, 0) + 1
    _attachments[process_group] = number
    return f"attach/{process_group.group_name}/{number}"


def announce(group: Group, what: str) -> None:
    """Say what the group will do, once for each configuration. Callers let only rank 0 do so."""
    configuration = group.describe()
    if configuration not in _announced:
        _announced.add(configuration)
        notices.say(_log, f"tailcut {__version__}: {what}; {configuration}")


def pass_on_news(group: Group) -> None:
    """Rank 0 says what was decided since the last call."""
    if group.rank == 0:
        for news in group.take_news():
            notices.say(_log, f"tailcut: {news}")


def sum_up(totals: Callable[[], Stats]) -> None:
    """Say at the end what the run has cost."""
    notices.say(_log, f"tailcut: {totals()}")
