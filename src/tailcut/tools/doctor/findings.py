"""What one rank found, filled on the way, so that a failure leaves what came before it. Travels as JSON."""

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
    """False: the limit ended it."""
    lost_frac: float


@dataclass
class Findings:
    rank: int
    hostname: str
    host: str
    """Identity: the same on ranks of one host and network."""
    checks: list[Check] = field(default_factory=list)
    """Of this host, then what this rank could not do."""
    pings: dict[int, Ping] = field(default_factory=dict)
    """To each peer."""
    heard: list[int] = field(default_factory=list)
    """Datagrams of each rank that came here."""
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
