"""What the package tells its user: lines for the log, and warnings that point at the user's own code."""

from __future__ import annotations

import logging
import sys
import warnings
from types import FrameType
from typing import Any, NamedTuple

_NOT_THE_USERS = frozenset(
    (
        *("tailcut", "torch", "threading", "importlib"),
        *("accelerate", "lightning", "pytorch_lightning", "ray", "torchft", "transformers"),
    )
)
"""Top-level modules that stand between the user's code and a warning."""


class Place(NamedTuple):
    """A line of code, as ``warnings`` wants to hear of it."""

    filename: str
    line: int
    module: str
    registry: dict[Any, Any]


def users_place() -> Place | None:
    """The line of the user's code that led here; None in a thread that the user did not start."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _NOT_THE_USERS:
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            return Place(frame.f_code.co_filename, frame.f_lineno, module, registry)
        frame = frame.f_back
    return None


def warn(text: str, otherwise: Place | None = None) -> None:
    """Warn at the user's line. ``otherwise``: where to point from a thread that the user did not start."""
    place = users_place() or otherwise
    if place is None:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    else:
        filename, line, module, registry = place
        warnings.warn_explicit(text, RuntimeWarning, filename, line, module, registry)


def say(log: logging.Logger, text: str) -> None:
    """Log a line. Where no logging is configured it goes to stderr, because every run should show it."""
    if log.hasHandlers():
        log.info(text)
    elif _level_of(log) <= logging.INFO:
        print(text, file=sys.stderr, flush=True)


def _level_of(log: logging.Logger) -> int:
    """What somebody has set for tailcut, else INFO: the root's default of WARNING is nobody's choice."""
    if log.manager.disable >= logging.INFO:
        return logging.CRITICAL
    ancestor: logging.Logger | None = log
    while ancestor is not None and ancestor is not log.root:
        if ancestor.level:
            return ancestor.level
        ancestor = ancestor.parent
    return logging.INFO
