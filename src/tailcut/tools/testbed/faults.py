"""A seeded schedule of trouble with processes and links, and the thread that plays it."""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tailcut.tools.testbed import system
from tailcut.tools.testbed.main_threads import MainThreads
from tailcut.tools.testbed.scenario import HostFreeze, HostHang, HostScenario, LinkDown

Action = Literal["freeze", "release", "hang", "resume", "kill", "link down", "link up"]
_SIGNALS: dict[Action, signal.Signals] = {
    "freeze": signal.SIGSTOP,
    "release": signal.SIGCONT,
    "kill": signal.SIGKILL,
}
_LINKS: dict[Action, str] = {"link down": "down", "link up": "up"}
_UNDONE_BY: dict[Action, Action] = {"freeze": "release", "hang": "resume", "link down": "link up"}


@dataclass(frozen=True, order=True)
class Event:
    at_s: float
    """The time after the commands have started."""
    host: int
    action: Action


def schedule(scenario: HostScenario) -> Iterator[Event]:
    """Yield all events in order. If a freeze repeats, there is no end of them."""
    once = [Event(kill.at_s, kill.host, "kill") for kill in scenario.kills]
    for dark in scenario.link_downs:
        once += _lasting(dark, "link down", "link up")
    for hang in scenario.hangs:
        once += _lasting(hang, "hang", "resume")
    freezes = [
        _frozen(freeze.host, times)
        for freeze, times in zip(scenario.freezes, freeze_times_s(scenario), strict=True)
    ]
    return heapq.merge(sorted(once), *freezes)


def freeze_times_s(scenario: HostScenario) -> list[Iterator[tuple[float, float]]]:
    """Return for each freeze of the scenario from when until when it lasts, without end if it repeats."""

    def times_s(freeze: HostFreeze, chance: random.Random) -> Iterator[tuple[float, float]]:
        at_s = freeze.at_s
        while True:
            yield at_s, at_s + freeze.for_s
            if not freeze.every_s:
                return
            at_s += freeze.for_s + chance.expovariate(1 / freeze.every_s)

    return [
        times_s(freeze, random.Random(f"{scenario.seed}/freeze/{i}"))
        for i, freeze in enumerate(scenario.freezes)
    ]


def _lasting(fault: HostHang | LinkDown, begin: Action, end: Action) -> list[Event]:
    return [Event(fault.at_s, fault.host, begin), Event(fault.at_s + fault.for_s, fault.host, end)]


def _frozen(host: int, times_s: Iterator[tuple[float, float]]) -> Iterator[Event]:
    for from_s, until_s in times_s:
        yield Event(from_s, host, "freeze")
        yield Event(until_s, host, "release")


class FaultPlayer:
    """Plays a schedule on the processes of each host, from its creation until ``close``."""

    def __init__(
        self,
        events: Iterator[Event],
        switch_namespace: str,
        processes: dict[int, list[subprocess.Popen[bytes]]],
        main_threads: MainThreads | None,
        tell: Callable[[Event], None],
    ) -> None:
        self.killed: set[int] = set()
        """Hosts whose processes were killed on purpose."""
        self._events = events
        self._switch = switch_namespace
        self._processes = processes
        self._main_threads = main_threads
        self._tell = tell
        self._to_undo: set[tuple[int, Action]] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._play, name="faults", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the clock. What is frozen or hangs goes on, and links that are dark come back."""
        self._closing.set()
        self._thread.join()
        for host, action in tuple(self._to_undo):
            self._do(Event(0.0, host, action))

    def _play(self) -> None:
        start_s = time.monotonic()
        for event in self._events:
            if self._closing.wait(max(0.0, start_s + event.at_s - time.monotonic())):
                return
            self._do(event)
            self._tell(event)

    def _do(self, event: Event) -> None:
        self._to_undo.discard((event.host, event.action))
        if undo := _UNDONE_BY.get(event.action):
            self._to_undo.add((event.host, undo))
        if event.action in _LINKS:
            system.run(
                *("ip", "-n", self._switch, "link", "set"),
                f"p{event.host}",
                _LINKS[event.action],
                check=False,
            )
            return
        if event.action == "kill":
            self.killed.add(event.host)
        # Each process is the first of a process group, so its children are hit too. poll() would reap a
        # process that somebody else waits for.
        groups = [process.pid for process in self._processes[event.host] if process.returncode is None]
        if event.action in ("hang", "resume"):
            assert self._main_threads
            self._main_threads.tell(event.action, event.host, groups)
            return
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, _SIGNALS[event.action])
