"""Gradient synchronization that ends by its deadline, over ordinary networks."""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailcut import codec
    from tailcut.config import Config
    from tailcut.epsilon import Epsilon
    from tailcut.errors import (
        BehindError,
        BudgetExceeded,
        ClosedError,
        ConfigError,
        PeerError,
        ReplayError,
        TailcutError,
    )
    from tailcut.group import Group, Work
    from tailcut.ledger.book import Ledger, RankLedger
    from tailcut.ledger.fates import Cut, Fates, LateUse
    from tailcut.ledger.records import Gap, Note, OpRecord, Start
    from tailcut.mirror import LateCompletion, Link, LinkStage, LrScale, StageReport, Traffic
    from tailcut.pytorch.attach import Attachment, attach
    from tailcut.report import Report, Verdict
    from tailcut.simulation.network import (
        Bursts,
        BurstyLoss,
        Machine,
        NeighbourFlows,
        Partition,
        RateChange,
        Wan,
    )
    from tailcut.simulation.run import Policy, Simulation, simulate
    from tailcut.simulation.scenario import Freeze, Hang, Scenario
    from tailcut.stats import OpBounds, Standing, Stats
    from tailcut.store import FileStore, Store

    __version__: str

__all__ = [
    "Attachment",
    "BehindError",
    "BudgetExceeded",
    "Bursts",
    "BurstyLoss",
    "ClosedError",
    "Config",
    "ConfigError",
    "Cut",
    "Epsilon",
    "Fates",
    "FileStore",
    "Freeze",
    "Gap",
    "Group",
    "Hang",
    "LateCompletion",
    "LateUse",
    "Ledger",
    "Link",
    "LinkStage",
    "LrScale",
    "Machine",
    "NeighbourFlows",
    "Note",
    "OpBounds",
    "OpRecord",
    "Partition",
    "PeerError",
    "Policy",
    "RankLedger",
    "RateChange",
    "ReplayError",
    "Report",
    "Scenario",
    "Simulation",
    "StageReport",
    "Standing",
    "Start",
    "Stats",
    "Store",
    "TailcutError",
    "Traffic",
    "Verdict",
    "Wan",
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
        "ReplayError",
        "TailcutError",
    ),
    "group": ("Group", "Work"),
    "ledger.book": ("Ledger", "RankLedger"),
    "ledger.fates": ("Cut", "Fates", "LateUse"),
    "ledger.records": ("Gap", "Note", "OpRecord", "Start"),
    "mirror": ("LateCompletion", "Link", "LinkStage", "LrScale", "StageReport", "Traffic"),
    "pytorch.attach": ("Attachment", "attach"),
    "report": ("Report", "Verdict"),
    "simulation.network": (
        "Bursts",
        "BurstyLoss",
        "Machine",
        "NeighbourFlows",
        "Partition",
        "RateChange",
        "Wan",
    ),
    "simulation.run": ("Policy", "Simulation", "simulate"),
    "simulation.scenario": ("Freeze", "Hang", "Scenario"),
    "stats": ("OpBounds", "Standing", "Stats"),
    "store": ("FileStore", "Store"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


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
