"""The sides of a race by name: Gloo, torch's hooks, nobody, tailcut with fields of its Config, presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tailcut.config import Config, flag
from tailcut.errors import ConfigError

TAILCUT = "tailcut"
HOOKS = ("fp16", "bf16", "powersgd")
"""Those of torch for DDP over Gloo. PowerSGD has rank 4, and one bucket."""
ALONE = "alone"
"""Nothing is exchanged. Its steps are the floor of all others on the same machine; its accuracy is that of
one rank's part of the batches."""
OTHERS = ("gloo", *HOOKS, ALONE)
LOSSLESS = "lossless"
"""Gloo over loopback: what the network does to it would only change its time."""
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "raw": {"codec": "raw"},
    "optireduce": {
        "codec": "planes",
        "planes": 16,
        "late": "discard",
        "resend": False,
        "adaptive": False,
        "drift_bound": 0.0,
        "rejoin": False,
    },
    "drive": {"codec": "planes", "planes": 1, "residue": "discard"},
    "eden4": {"codec": "planes", "planes": 4, "residue": "discard"},
}
"""What others have published, as far as Config can say it (benchmarks/README.md has what differs)."""
DEADLINE_IS_MEASURED = "optireduce"


@dataclass(frozen=True)
class Side:
    name: str
    kind: str
    """tailcut, or one of OTHERS."""
    config: Mapping[str, Any]
    """Fields of Config; only for tailcut."""

    @property
    def on_loopback(self) -> bool:
        return self.name == LOSSLESS

    @property
    def measured_deadline(self) -> bool:
        """Whether ``deadline_s`` comes from iterations over Gloo before the race."""
        return self.name == DEADLINE_IS_MEASURED


def parse_sides(text: str) -> list[Side]:
    """``tailcut:planes=4,dscp=10,fp16``: an entry with a ``=`` and without a name belongs to the side before
    it."""
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--sides has {', '.join(sorted(repeated))} more than once")
    return [parse_side(name) for name in names]


def parse_side(name: str) -> Side:
    kind, _, settings = name.partition(":")
    known = (TAILCUT, *OTHERS, *PRESETS, LOSSLESS)
    if kind not in known:
        raise ConfigError(f"there is no side {kind!r}; there are {', '.join(known)}")
    if settings and kind != TAILCUT:
        raise ConfigError(f"{name}: only tailcut takes settings")
    if kind in PRESETS:
        return Side(name, TAILCUT, PRESETS[kind])
    return Side(name, "gloo" if kind == LOSSLESS else kind, _settings(name, settings))


def _settings(name: str, settings: str) -> dict[str, Any]:
    defaults = vars(Config())
    config: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        field, _, value = setting.partition("=")
        if field not in defaults:
            raise ConfigError(f"{name}: Config has no {field!r}; it has {', '.join(defaults)}")
        of_type = type(defaults[field])
        try:
            config[field] = flag(value) if of_type is bool else of_type(value)
        except ValueError:
            raise ConfigError(f"{name}: {field}={value!r} is not of type {of_type.__name__}") from None
    Config(**config)
    return config
