"""Puts the findings of all ranks together: which checks to show for whom, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from tailcut.tools.doctor import network
from tailcut.tools.doctor.check import SEVERITY, Check, Setting
from tailcut.tools.doctor.findings import Findings
from tailcut.tools.doctor.member import Options

EXIT_OK, EXIT_FAIL = 0, 1


@dataclass(frozen=True)
class Placed:
    """A check, and where it holds."""

    where: str
    rank: int | None
    """The rank that made it; None if it comes from the findings of all ranks."""
    check: Check


@dataclass(frozen=True)
class Diagnosis:
    world_size: int
    bucket_bytes: int
    ranks: dict[int, Findings]
    """The findings of the ranks that reported."""
    checks: list[Placed]

    @property
    def exit_status(self) -> int:
        return EXIT_FAIL if any(placed.check.status == "fail" for placed in self.checks) else EXIT_OK

    @property
    def settings(self) -> list[tuple[Setting, list[str]]]:
        """What to set, and where. A setting for several hosts comes once."""
        places: dict[Setting, list[str]] = {}
        for placed in self.checks:
            for setting in placed.check.settings:
                where = places.setdefault(setting, [])
                if placed.where not in where:
                    where.append(placed.where)
        return list(places.items())


def diagnose(ranks: dict[int, Findings], world_size: int, options: Options) -> Diagnosis:
    ranks = dict(sorted(ranks.items()))
    checks = _of_hosts(ranks)
    if world_size > 1:
        together = network.judge(ranks, world_size, options.config.deadline_s, options.bucket_bytes)
        checks += [Placed("network", None, check) for check in together]
    return Diagnosis(world_size, options.bucket_bytes, ranks, checks)


def _of_hosts(ranks: dict[int, Findings]) -> list[Placed]:
    """The checks of each host, once: if its ranks differ, the worst, and among equal ones the first."""
    worst: dict[tuple[str, str], Placed] = {}
    for rank, findings in ranks.items():
        for check in findings.checks:
            key = (findings.host, check.name)
            if key not in worst or SEVERITY[check.status] > SEVERITY[worst[key].check.status]:
                worst[key] = Placed(_label(ranks, findings), rank, check)
    return list(worst.values())


def _label(ranks: dict[int, Findings], findings: Findings) -> str:
    """The name of the host, with the rank if two hosts share a name."""
    hosts = {other.host for other in ranks.values() if other.hostname == findings.hostname}
    return findings.hostname if len(hosts) == 1 else f"{findings.hostname} (rank {findings.rank})"
