"""What one rank found. It grows during the run, so that a failure keeps what came before. Travels as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tailcut.tools.doctor.check import Check, Setting
from tailcut.tools.doctor.ping import Ping


@dataclass(frozen=True)
class Op:
    """One allreduce on one rank."""

    elapsed_s: float
    complete: bool
    """False if the limit ended it."""
    lost_frac: float
    sources_s: list[float | None] = field(default_factory=list)
    """By rank: how long its contribution took to come here, from its entry on. None if there was none."""


@dataclass
class Findings:
    rank: int
    hostname: str
    host: str
    """An identity that ranks of one host and network share."""
    checks: list[Check] = field(default_factory=list)
    """The checks of this host, then what this rank could not do."""
    pings: dict[int, Ping] = field(default_factory=dict)
    """What came of the datagrams to each peer."""
    heard: list[int] = field(default_factory=list)
    """How many datagrams came from each rank."""
    ops: list[Op] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Findings:
        checks = [
            Check(**{**check, "settings": tuple(Setting(**s) for s in check["settings"])})
            for check in value["checks"]
        ]
        pings = {int(peer): Ping(**ping) for peer, ping in value["pings"].items()}
        return cls(**{**value, "checks": checks, "pings": pings, "ops": [Op(**op) for op in value["ops"]]})
