"""Gradient synchronization that ends by its deadline, over ordinary networks."""

from tailcut.config import Config
from tailcut.errors import ClosedError, ConfigError, PeerError, TailcutError
from tailcut.group import Group, Stats, Work
from tailcut.report import Report
from tailcut.simulation import Freeze, Partition, Scenario, Simulation, simulate
from tailcut.store import FileStore

__all__ = [
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
    "simulate",
]
