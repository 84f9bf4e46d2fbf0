"""``tailcut doctor`` examines this host, and with peers also the network between them.

Owns how a run begins and ends: alone, with local workers, or as one rank among others. Uses only what a group
uses, and changes nothing on the host.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tailcut.errors import PeerError
from tailcut.store import FileStore, Store
from tailcut.tools.doctor.diagnosis import EXIT_FAIL, EXIT_OK, Diagnosis, diagnose
from tailcut.tools.doctor.exchange import PAUSE_S, Exchange, begin_run, current_run
from tailcut.tools.doctor.findings import Findings
from tailcut.tools.doctor.member import Options, examine, examine_host
from tailcut.tools.workers import Send, Workers

COLLECT_S = 10.0
"""How much longer than rank 0 a rank may take to report. The others wait twice as long for the verdict."""
FAREWELL_S = 2.0
"""How long rank 0 stays so that the others can read the verdict: it may host the store."""

ASSUMED_WORLD_SIZE = 8
"""The number of ranks for which a host alone is judged, if none is given."""

Show = Callable[[Diagnosis], None]


def run_alone(options: Options, world_size: int = ASSUMED_WORLD_SIZE) -> Diagnosis:
    """Examine this host alone, and judge it for a group of this size."""
    return diagnose({0: examine_host(0, world_size, options.config)}, 1, options)


def run_local(ranks: int, options: Options) -> Diagnosis:
    """Examine with ranks on this host, each in its own process. Raises PeerError when one is killed."""
    with (
        tempfile.TemporaryDirectory(prefix="tailcut-doctor-") as directory,
        Workers(ranks, _work, (ranks, Path(directory), options)) as workers,
    ):
        for heard in workers.messages():
            if heard is not None and isinstance(heard[1], Diagnosis):
                return heard[1]
    raise PeerError("the local ranks ended without a diagnosis")


def _work(rank: int, send: Send, ranks: int, directory: Path, options: Options) -> None:
    run_member(rank, ranks, FileStore(directory), options, send, complain=lambda text: None)


def run_member(
    rank: int,
    world_size: int,
    store: Store,
    options: Options,
    show: Show,
    complain: Callable[[str], None],
) -> int:
    """Be one rank of a run; returns the exit status. Rank 0 shows the diagnosis, others their failures."""
    run = os.urandom(8).hex()
    if rank == 0:
        begin_run(store, run)
    findings = examine(rank, world_size, store, options)
    if rank == 0:
        return _conclude(findings, world_size, Exchange(store, run, rank), options, show)
    failures = [check.found for check in findings.checks if check.status == "fail"]
    for text in failures:
        complain(f"rank {rank}: {text}")
    verdict = _report(findings, store, token=run)
    if verdict is None:
        complain(f"rank {rank}: rank 0 did not say how the run went: is it running, with the same store?")
    return EXIT_FAIL if failures or verdict is None else verdict


def _conclude(findings: Findings, world_size: int, exchange: Exchange, options: Options, show: Show) -> int:
    patience_s = min(COLLECT_S, options.config.rendezvous_s)
    values = exchange.collect("findings", range(1, world_size), patience_s)
    ranks = {rank: Findings.from_json(value["findings"]) for rank, value in values.items()}
    diagnosis = diagnose({0: findings, **ranks}, world_size, options)
    show(diagnosis)
    read = [value["token"] for value in values.values()]
    exchange.publish("verdict", {"status": diagnosis.exit_status, "read": read})
    exchange.collect("seen", ranks, FAREWELL_S)
    return diagnosis.exit_status


def _report(findings: Findings, store: Store, token: str) -> int | None:
    """Send the findings to rank 0, and return the verdict of the one that has read them, or None.

    Rank 0 may begin later than this rank fails, and the store may hold the verdict of an earlier run.
    """
    give_up = time.monotonic() + 2 * COLLECT_S
    exchange, told = None, None
    with suppress(PeerError):  # the store ended with rank 0
        while time.monotonic() < give_up:
            run = current_run(store)
            if run is not None and run != told:
                exchange, told = Exchange(store, run, findings.rank), run
                exchange.publish("findings", {"token": token, "findings": findings.as_json()})
            verdict = exchange.get("verdict", 0) if exchange else None
            if exchange and verdict and token in verdict["read"]:
                exchange.publish("seen", True)
                return int(verdict["status"])
            time.sleep(PAUSE_S)
    return None


__all__ = [
    "ASSUMED_WORLD_SIZE",
    "EXIT_FAIL",
    "EXIT_OK",
    "Diagnosis",
    "Options",
    "run_alone",
    "run_local",
    "run_member",
]
