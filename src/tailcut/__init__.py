"""Gradient synchronization that ends by its deadline, over ordinary networks."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tailcut.config import Config
from tailcut.errors import BehindError, ClosedError, ConfigError, PeerError, TailcutError
from tailcut.group import Group, Work
from tailcut.report import Report
from tailcut.simulation import Freeze, Partition, Scenario, Simulation, simulate
from tailcut.stats import Stats
from tailcut.store import FileStore

if TYPE_CHECKING:
    from tailcut.pytorch.attach import Attachment, attach

__all__ = [
    "Attachment",
    "BehindError",
    "ClosedError",
    "Config",
    "ConfigError",
    "FileStore",
    "Freeze",
    "Group",
    "Partition",
    "PeerError",
    "Report",
    "Scenario",
    "Simulation",
    "Stats",
    "TailcutError",
    "Work",
    "attach",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """The PyTorch names, when they are first used: tailcut itself does not need torch."""
    if name not in ("Attachment", "attach"):
        raise AttributeError(f"module 'tailcut' has no attribute {name!r}")
    if find_spec("torch") is None:
        raise ImportError(f"tailcut.{name} needs torch: pip install tailcut[torch]")
    from tailcut.pytorch import attach as module

    return getattr(module, name)
