"""What the doctor says: checks with their remedies, and the settings that follow from them. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
SEVERITY: dict[Status, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Setting:
    """One thing to set, and why."""

    name: str
    """An environment variable, or a sysctl if it begins with ``net.``."""
    value: str
    why: str

    @property
    def command(self) -> str:
        prefix = "sudo sysctl -w" if self.name.startswith("net.") else "export"
        return f"{prefix} {self.name}={self.value}"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    settings: tuple[Setting, ...] = ()
