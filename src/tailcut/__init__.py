"""Gradient synchronization that ends by its deadline, over ordinary networks."""

from tailcut.config import Config
from tailcut.errors import ClosedError, ConfigError, PeerError, TailcutError
from tailcut.group import Group, Stats, Work
from tailcut.report import Report
from tailcut.store import FileStore

__all__ = [
    "ClosedError",
    "Config",
    "ConfigError",
    "FileStore",
    "Group",
    "PeerError",
    "Report",
    "Stats",
    "TailcutError",
    "Work",
]
