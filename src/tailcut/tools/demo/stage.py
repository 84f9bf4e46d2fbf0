"""Where a demo takes place: on a testbed, or, where no network can be built, on loopback."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from tailcut.errors import ConfigError, TailcutError
from tailcut.tools.demo.options import ON_LOOPBACK, SCENARIO, Options
from tailcut.tools.testbed import HostScenario, Testbed, load_scenario, system
from tailcut.tools.testbed.privilege import become_root_of_a_namespace

PROGRAMS = ("ip", "tc", "bridge", "ethtool", "setpriv")


@dataclass(frozen=True)
class Stage:
    scenario: HostScenario
    loopback: bool
    words: str
    """The place, for people."""
    instead_of: str | None = None
    """Why it is not a testbed, where a testbed was wanted."""


def choose(options: Options) -> Stage:
    """Without root, this may start the command again inside a user namespace."""
    wanted = load_scenario(options.scenario or SCENARIO, **options.hosts)
    if options.loopback:
        return _on_loopback(options, None)
    try:
        for name in PROGRAMS:
            system.program(name)
        become_root_of_a_namespace()
        with Testbed.up(wanted) as testbed:
            return Stage(wanted, False, testbed.summary())
    except TailcutError as error:
        if os.geteuid() == 0 and system.in_user_namespace():
            with contextlib.suppress(ConfigError):
                system.run("ip", "link", "set", "lo", "up")  # a new network has it down
        return _on_loopback(options, error)


def _on_loopback(options: Options, error: TailcutError | None) -> Stage:
    scenario = load_scenario(options.scenario or ON_LOOPBACK, **options.hosts)
    if not (scenario.freezes or scenario.kills):
        why = f"there can be no testbed here: {error}" if error else "--loopback has none"
        raise ConfigError(
            f"{scenario.name} needs a testbed's network, and {why}. Without --scenario the demo has "
            "stragglers on loopback"
        )
    words = f"{scenario.name}, {scenario.hosts} workers on loopback, no network between them"
    return Stage(scenario, True, words, str(error) if error else None)
