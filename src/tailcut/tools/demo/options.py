"""What a demo is asked to do. Checked before anything runs."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from tailcut.errors import ConfigError

SCENARIO = "tail-3"
ON_LOOPBACK = "straggler"
"""The scenario where no network can be built: it only stops processes."""
LEAST_SECONDS = 2.0
MOST_SECONDS = 3600.0
PROBE = ".tailcut-demo"


@dataclass(frozen=True, kw_only=True)
class Options:
    scenario: str | None = None
    """None: SCENARIO, or ON_LOOPBACK where no network can be built."""
    model: str = "cnn"
    data: Path | None = None
    """None takes what is always there."""
    workers: int | None = None
    """None: as many as the scenario has hosts."""
    seeds: int = 1
    seconds: float = 40.0
    """Of timed steps for each side and seed."""
    loopback: bool = False
    output: Path = Path("tailcut-demo")

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 2:
            raise ConfigError(
                f"--workers {self.workers}: one worker has nobody to average with; take 2 or more"
            )
        if self.seeds < 1:
            raise ConfigError(f"--seeds {self.seeds}: it takes at least 1")
        if not (math.isfinite(self.seconds) and LEAST_SECONDS <= self.seconds <= MOST_SECONDS):
            raise ConfigError(
                f"--seconds {self.seconds:g}: it takes {LEAST_SECONDS:g} to {MOST_SECONDS:g} for each side"
            )

    @property
    def hosts(self) -> dict[str, int]:
        """What replaces fields of the scenario."""
        return {} if self.workers is None else {"hosts": self.workers}

    def prepare_output(self) -> None:
        """Make the directory. Raises if nothing can be written into it."""
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            probe = self.output / PROBE
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"--output {self.output}: cannot write there ({error.strerror}); name another directory"
            ) from error

    def command(self, scenario: str) -> str:
        """What a person types to do the same again."""
        words = ["tailcut", "demo", "--scenario", scenario, "--model", self.model]
        words += ["--data", str(self.data) if self.data else "none"]
        words += [] if self.workers is None else ["--workers", str(self.workers)]
        words += ["--seeds", str(self.seeds), "--seconds", f"{self.seconds:g}"]
        return shlex.join(words + ["--loopback"] * self.loopback)


def data_of(given: str | None) -> Path | None:
    """Where the data is: as given, or as TAILCUT_DATA says. ``none`` is what is always there."""
    named = given or os.environ.get("TAILCUT_DATA") or "none"
    return None if named == "none" else Path(named).resolve()
