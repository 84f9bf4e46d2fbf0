"""Gradient synchronization that ends by its deadline, over ordinary networks."""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from tailcut import codec
    from tailcut.config import Config
    from tailcut.epsilon import Epsilon
    from tailcut.errors import (
        BehindError,
        BudgetExceeded,
        ClosedError,
        ConfigError,
        PeerError,
        TailcutError,
    )
    from tailcut.group import Group, Work
    from tailcut.mirror import LateCompletion, Link, LinkStage, LrScale, StageReport, Traffic
    from tailcut.pytorch.attach import Attachment, attach
    from tailcut.report import Report
    from tailcut.simulation import Freeze, Partition, Scenario, Simulation, simulate
    from tailcut.stats import Stats
    from tailcut.store import FileStore

__all__ = [
    "Attachment",
    "BehindError",
    "BudgetExceeded",
    "ClosedError",
    "Config",
    "ConfigError",
    "Epsilon",
    "FileStore",
    "Freeze",
    "Group",
    "LateCompletion",
    "Link",
    "LinkStage",
    "LrScale",
    "Partition",
    "PeerError",
    "Report",
    "Scenario",
    "Simulation",
    "StageReport",
    "Stats",
    "TailcutError",
    "Traffic",
    "Work",
    "attach",
    "codec",
    "simulate",
]

_HOMES = {
    "config": ("Config",),
    "epsilon": ("Epsilon",),
    "errors": (
        "BehindError",
        "BudgetExceeded",
        "ClosedError",
        "ConfigError",
        "PeerError",
        "TailcutError",
    ),
    "group": (
        "Group",
        "Work",
    ),
    "mirror": ("LateCompletion", "Link", "LinkStage", "LrScale", "StageReport", "Traffic"),
    "pytorch.attach": (
        "Attachment",
        "attach",
    ),
    "report": ("Report",),
    "simulation": (
        "Freeze",
        "Partition",
        "Scenario",
        "Simulation",
        "simulate",
    ),
    "stats": ("Stats",),
    "store": ("FileStore",),
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: torch imports tailcut for its backend, and most need no more."""
    if name == "__version__":
        return metadata.version("tailcut")
    if name == "codec":
        return import_module("tailcut.codec")
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'tailcut' has no attribute {name!r}")
    if home.startswith("pytorch") and find_spec("torch") is None:
        raise ImportError(f"tailcut.{name} needs torch: pip install tailcut[torch]")
    value = globals()[name] = getattr(import_module(f"tailcut.{home}"), name)
    return value
