"""What the user is told while ops end, each thing once: a dropped rank, a switch that trims, excess cost."""

from __future__ import annotations

from tailcut.policy.grid import GridSteering
from tailcut.report import Report

_TRIMMED = (
    "tailcut: a switch on the way trims packets, and trim_bytes=0 says that it is not known to what: set "
    "Config.trim_bytes to the shortest frame that it leaves (256 is common), so that with the codec planes "
    "every packet keeps the first plane of all its coordinates and need not be sent again"
)


class Alarms:
    """Remembers what was told."""

    def __init__(self, steering: GridSteering, trim_bytes: int) -> None:
        self._steering = steering
        self._expects_trimming = trim_bytes > 0
        self._trimmed = False
        self._told_trimmed = False
        self._told_excess = False

    def after(self, report: Report) -> None:
        self._trimmed |= report.traffic.trimmed_packets > 0

    def take(self) -> list[str]:
        """What to warn of now."""
        alarms = self._steering.take_alarms()
        if self._trimmed and not (self._told_trimmed or self._expects_trimming):
            self._told_trimmed = True
            alarms.append(_TRIMMED)
        return alarms

    def excess_begins(self) -> bool:
        """Whether ops have just begun to cost more than the budget for a long time."""
        lasts = self._steering.spending.persistent
        begins = lasts and not self._told_excess
        self._told_excess = lasts
        return begins
