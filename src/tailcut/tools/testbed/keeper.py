"""The process that owns a testbed which was brought up for people. It lives until it is told to go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tailcut.errors import ConfigError, TailcutError
from tailcut.tools.testbed.record import Record, records
from tailcut.tools.testbed.scenario_file import parse_scenario
from tailcut.tools.testbed.testbed import AGENT_ENVIRONMENT, SwitchKind, Testbed

REFRESH_S = 0.5
DOWN_LIMIT_S = 10.0
"""After this long ``down`` no longer trusts the keeper and removes everything itself."""


def start(name: str, toml: str, overrides: dict[str, int], switch: SwitchKind) -> dict[str, Any]:
    """Start a keeper in the background, and return the status of its testbed when it is up."""
    order = json.dumps({"name": name, "toml": toml, "overrides": overrides, "switch": switch})
    process = subprocess.Popen(
        [sys.executable, "-m", "tailcut.tools.testbed.keeper", order],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, **AGENT_ENVIRONMENT},
        start_new_session=True,
    )
    assert process.stdout
    answer = json.loads(process.stdout.readline() or '{"error": "the keeper of the testbed died"}')
    process.stdout.close()
    process.returncode = 0  # it lives on: nobody is to wait for it
    if "error" in answer:
        raise ConfigError(answer["error"])
    status: dict[str, Any] = answer
    return status


def end(record: Record) -> None:
    """Tell the keeper to go, and see to it that everything is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.owner_pid, signal.SIGTERM)
    until_s = time.monotonic() + DOWN_LIMIT_S
    while record.directory.exists() and record.owner_lives and time.monotonic() < until_s:
        time.sleep(0.01)
    if record.directory.exists():
        record.remove()


def chosen(testbed: str | None) -> Record:
    """Return the record of an id, or the only record there is."""
    found = [record for record in records() if testbed in (None, record.id)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"there is no testbed {testbed}" if testbed else "no testbed is up")
    raise ConfigError(f"several testbeds are up, name one: {', '.join(record.id for record in found)}")


def _keep(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    scenario = parse_scenario(order["toml"], order["name"], order["overrides"])
    with Testbed.up(scenario, order["switch"]) as testbed:
        testbed.begin_background()
        testbed.publish_status()
        _answer(testbed.status())
        _detach(testbed.record.directory / "log")
        while True:
            time.sleep(REFRESH_S)
            testbed.publish_status()


def _answer(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def _detach(log: Path) -> None:
    """Close the output of ``up``, so that whoever reads it sees its end."""
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


if __name__ == "__main__":
    try:
        _keep(json.loads(sys.argv[1]))
    except TailcutError as error:
        _answer({"error": str(error)})
