"""The options of ``tailcut testbed``, and where its output goes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailcut.tools.testbed import (
    Testbed,
    character,
    keeper,
    launch,
    load_scenario,
    scenario_text,
    shipped_names,
)
from tailcut.tools.testbed.character import Character
from tailcut.tools.testbed.display import Screen, describe_status, port_table
from tailcut.tools.testbed.privilege import become_root_of_a_namespace
from tailcut.tools.testbed.record import records, remove_leftovers

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "testbed",
        help="hosts, a trimming switch and trouble on purpose, inside this machine",
        description="Builds a network of namespaces as a scenario says, and runs commands on its hosts. "
        "With root, the switch is a BPF program; without, a process forwards.",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_run(actions)
    up = actions.add_parser("up", help="bring a scenario up, until down")
    _add_scenario(up)
    up.set_defaults(run=_up)
    status = actions.add_parser("status", help="what is up, and what its ports have done")
    status.add_argument("id", nargs="?", help="of one testbed (default: all)")
    status.add_argument("--json", action="store_true", help="print one JSON document instead")
    status.set_defaults(run=_status)
    down = actions.add_parser("down", help="end a testbed")
    down.add_argument("id", nargs="?", help="which, if there are several")
    down.set_defaults(run=_down)
    scenarios = actions.add_parser("scenarios", help="list the scenarios, or print one as TOML")
    scenarios.add_argument("name", nargs="?", help="print this one")
    scenarios.set_defaults(run=_scenarios)


def _add_run(actions: Commands) -> None:
    parser = actions.add_parser(
        "run",
        help="run a command on every host of a scenario",
        usage="tailcut testbed run [options] SCENARIO -- COMMAND [ARGUMENT ...]",
        description="Runs COMMAND once on every host, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and "
        "LOCAL_RANK set as torchrun does. Exit status: 0, or that of the first command that failed for "
        "reasons of its own; the others are then ended.",
    )
    parser.set_defaults(run=_run, command=[])
    _add_scenario(parser)
    parser.add_argument(
        "--no-measure",
        dest="measure",
        action="store_false",
        help="begin at once, without measuring round trips, rates and tails",
    )


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("scenario", metavar="SCENARIO", help="its name (see: tailcut testbed scenarios) or a file.toml")
    add("--hosts", type=int, metavar="N", help="instead of the scenario's number")
    add("--seed", type=int, metavar="N", help="instead of the scenario's")
    add(
        "--switch",
        choices=["auto", "bpf", "forwarder"],
        default="auto",
        help="BPF in the kernel, or a process (default: BPF with root)",
    )
    add("--json", action="store_true", help="one JSON document to stdout at the end, all else to stderr")


def _overrides(arguments: argparse.Namespace) -> dict[str, int]:
    given = {"hosts": arguments.hosts, "seed": arguments.seed}
    return {name: value for name, value in given.items() if value is not None}


def _run(arguments: argparse.Namespace) -> int:
    launch.check_command(arguments.command)
    scenario = load_scenario(arguments.scenario, **_overrides(arguments))
    screen = Screen(sys.stderr if arguments.json else sys.stdout, sys.stderr)
    for left in remove_leftovers():
        screen.say(f"[testbed] removed {left}, whose owner was killed")
    become_root_of_a_namespace()
    with Testbed.up(scenario, arguments.switch) as testbed:
        screen.say(f"[testbed] {testbed.record.id}: {testbed.summary()}")
        measured = _measured(testbed, screen, arguments.measure)
        before = testbed.counters()
        try:
            endings = launch.run_on_all(testbed, arguments.command, screen)
        finally:
            screen.close()
        status = testbed.status()
        counted = [new.since(old) for new, old in zip(testbed.counters(), before, strict=True)]
    screen.say(port_table(counted))
    if arguments.json:
        _print_json(
            {
                **status,
                "ports": [asdict(counters) for counters in counted],
                "character": asdict(measured) if measured else None,
                "endings": [asdict(ending) for ending in endings],
            }
        )
    return launch.exit_status(endings)


def _measured(testbed: Testbed, screen: Screen, wanted: bool) -> Character | None:
    """Measure the testbed's character and show it. Background traffic runs afterwards in any case."""
    if not wanted:
        testbed.begin_background()
        return None
    measured = character.measure(testbed)
    for line in measured.lines():
        screen.say(f"[testbed] {line}")
    return measured


def _up(arguments: argparse.Namespace) -> None:
    name = Path(arguments.scenario).name.removesuffix(".toml")
    remove_leftovers()
    become_root_of_a_namespace()
    status = keeper.start(name, scenario_text(arguments.scenario), _overrides(arguments), arguments.switch)
    if arguments.json:
        _print_json(status)
    else:
        print(describe_status(status))
        print(f"end it with: tailcut testbed down {status['id']}")


def _status(arguments: argparse.Namespace) -> None:
    found = [keeper.chosen(arguments.id)] if arguments.id else records()
    statuses = [{"id": record.id, "alive": record.owner_lives, **record.read_status()} for record in found]
    if arguments.json:
        _print_json(statuses)
        return
    for record, status in zip(found, statuses, strict=True):
        if not record.owner_lives:
            print(f"{record.id}: its owner was killed; the next run, up or down removes what is left")
        elif "ports" not in status:
            print(f"{record.id}: coming up, or going down")
        else:
            print(describe_status(status))
    if not found:
        print("no testbed is up")


def _down(arguments: argparse.Namespace) -> None:
    removed = remove_leftovers()
    for left in removed:
        print(f"removed {left}, whose owner was killed")
    if arguments.id not in removed and (arguments.id or records() or not removed):
        keeper.end(keeper.chosen(arguments.id))


def _scenarios(arguments: argparse.Namespace) -> None:
    if arguments.name:
        print(scenario_text(arguments.name), end="")
        return
    for name in shipped_names():
        print(f"{name:<12}{load_scenario(name).description}")


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=1), flush=True)
