"""What a run of ``tailcut sim`` is asked for. It is checked once, so that a mistake costs no time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailcut.errors import ConfigError
from tailcut.grid import grid_of
from tailcut.simulation.baseline import ALGORITHMS
from tailcut.tools.testbed import HostScenario

MOST_VALUE_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run."""

    scenario: HostScenario
    ranks: tuple[int, ...] = ()
    """The numbers of ranks, one row for each. If it is empty, the scenario's number of hosts."""
    size_bytes: int = 25 << 20
    ops: int = 200
    warmup: int | None = None
    """How many of the first ops do not count, while windows and bounds find their size. None takes a tenth of
    the ops, and at most 20."""
    rows: int = 0
    """The number of rows of a grid; 0 takes what a Group would choose."""
    codec: str = "raw"
    planes: int = 16
    mtu_bytes: int | None = None
    rate_bytes_per_s: float | None = None
    against: tuple[str, ...] = ()
    seed: int | None = None
    deadline_s: float | None = None
    adaptive: bool = True
    """Whether bounds adapt as in a Group. Otherwise they are shares of the deadline."""
    values: bool = False
    receive_buffer_bytes: int = 8 << 20
    """The socket buffer as the kernel reports it. Senders share it."""
    compute_s: float = 0.0
    """How long every rank computes between the end of an op and the entry into the next."""
    keyed: bool = False
    """Whether all ops are of one bucket with a key, as those of ``attach`` are: what is late is carried."""
    cores: int = 0
    """If it is not 0, the testbed is simulated: hosts share so many cores, and links are token buckets."""

    def __post_init__(self) -> None:
        for ranks in self.all_ranks:
            if not 2 <= ranks <= 4096:
                raise ConfigError(f"ranks={ranks} must be between 2 and 4096")
            grid_of(ranks, self.rows)
        if self.size_bytes < 4 or self.size_bytes % 4:
            raise ConfigError(f"size {self.size_bytes} must be a positive multiple of 4: buckets are float32")
        if self.ops < 1 or not 0 <= self.warmup_ops < self.ops:
            raise ConfigError(f"ops={self.ops} must be at least 1 and more than warmup={self.warmup_ops}")
        for name in self.against:
            if name not in ALGORITHMS:
                raise ConfigError(f"cannot compare with {name!r}; there are {', '.join(ALGORITHMS)}")
        if self.cores < 0:
            raise ConfigError(f"cores={self.cores} must be 0 or the number of cores of a testbed's machine")
        if not 1 <= self.planes <= 16:
            raise ConfigError(f"planes={self.planes} must be between 1 and 16 bits a coordinate")
        _ = self.simulated  # checks seed, MTU and rate
        if self.values and self.ops * max(self.all_ranks) * self.size_bytes > MOST_VALUE_BYTES:
            raise ConfigError(
                f"values of {self.ops} ops of {max(self.all_ranks)} ranks take more than 4 GB: lower --size "
                "or --ops, or go without values"
            )

    @property
    def simulated(self) -> HostScenario:
        """The scenario, with the given seed, MTU and rate instead of its own."""
        port = self.scenario.port
        rate_mbit_s = None if self.rate_bytes_per_s is None else 8e-6 * self.rate_bytes_per_s
        return replace(
            self.scenario,
            seed=self.scenario.seed if self.seed is None else self.seed,
            port=replace(
                port,
                mtu_bytes=port.mtu_bytes if self.mtu_bytes is None else self.mtu_bytes,
                rate_mbit_s=port.rate_mbit_s if rate_mbit_s is None else rate_mbit_s,
            ),
        )

    @property
    def all_ranks(self) -> tuple[int, ...]:
        return self.ranks or (self.scenario.hosts,)

    @property
    def warmup_ops(self) -> int:
        return min(20, self.ops // 10) if self.warmup is None else self.warmup
