"""Scenarios as TOML files: the ones that come with the package, by name, and anybody's, by path."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from tailcut.errors import ConfigError
from tailcut.tools.testbed.scenario import (
    Bursts,
    BurstyLoss,
    HostFreeze,
    HostHang,
    HostScenario,
    Jobs,
    Kill,
    LinkDown,
    Neighbours,
    Port,
    SlowPort,
    Switch,
    Tail,
    Wan,
    known_fields,
)

T = TypeVar("T")

_TABLES: dict[str, type] = {
    "port": Port,
    "switch": Switch,
    "bursts": Bursts,
    "tail": Tail,
    "neighbours": Neighbours,
    "jobs": Jobs,
    "wan": Wan,
}
_LISTS: dict[str, type] = {
    "slow_ports": SlowPort,
    "freezes": HostFreeze,
    "hangs": HostHang,
    "kills": Kill,
    "link_downs": LinkDown,
}
_SHIPPED = resources.files("tailcut.tools.testbed") / "scenarios"


def shipped_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in _SHIPPED.iterdir())


def scenario_text(name: str) -> str:
    """Return the TOML of a scenario of the package, or of the file at a path that ends in .toml."""
    if name.endswith(".toml"):
        try:
            return Path(name).read_text()
        except OSError as error:
            raise ConfigError(f"cannot read the scenario {name}: {error.strerror}") from error
    if name not in shipped_names():
        raise ConfigError(
            f"there is no scenario {name!r}; there are {', '.join(shipped_names())}, or give a file.toml"
        )
    return (_SHIPPED / f"{name}.toml").read_text()


def load_scenario(name: str, **overrides: int) -> HostScenario:
    """Load a scenario by name or path. ``overrides`` replace fields such as ``hosts`` and ``seed``."""
    return parse_scenario(scenario_text(name), Path(name).name.removesuffix(".toml"), overrides)


def parse_scenario(text: str, name: str, overrides: Mapping[str, int] | None = None) -> HostScenario:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise ConfigError("on Python 3.10 scenarios need tomli: pip install 'tailcut[testbed]'") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"scenario {name}: not valid TOML: {error}") from error
    values: dict[str, Any] = {"name": name}
    for key, value in document.items():
        where = f"scenario {name}: [{key}]"
        if key in _TABLES:
            values[key] = built_table(_TABLES[key], value, where)
        elif key in _LISTS:
            entries = value if isinstance(value, list) else [value]
            values[key] = tuple(
                built_table(_LISTS[key], entry, f"{where} {i}") for i, entry in enumerate(entries)
            )
        else:
            values[key] = value
    values.update(overrides or {})
    return built_table(HostScenario, values, f"scenario {name}")


def built_table(kind: type[T], table: Any, where: str) -> T:
    """Make an instance of a scenario's class from a table of TOML or JSON."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: must be a table")
    if unknown := set(table) - set(known_fields(kind)):
        raise ConfigError(
            f"{where}: unknown {', '.join(sorted(unknown))}; known are {', '.join(known_fields(kind))}"
        )
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    if kind is Switch and "bursty_loss" in values:
        values["bursty_loss"] = built_table(BurstyLoss, values["bursty_loss"], f"{where} bursty_loss")
    try:
        return kind(**values)
    except TypeError as error:
        missing = str(error).partition(": ")[2]
        raise ConfigError(f"{where}: {missing} missing") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
