"""AllReduce as others do it, in the same simulated network: a ring or a tree over a reliable transport.

The model is in native/sim/{collective,transport,baseline}.hpp. docs/simulation.md says what it assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailcut import _native
from tailcut.errors import ConfigError
from tailcut.simulation.network import TCP_HEADER_BYTES, SimulatedNetwork, ns
from tailcut.simulation.scenario import Freeze, Hang

ALGORITHMS = {"ring": _native.Algorithm.RING, "tree": _native.Algorithm.TREE}


@dataclass(frozen=True, kw_only=True)
class Baseline(SimulatedNetwork):
    """One algorithm, its program and its network. Equal values give equal results, as with a Scenario."""

    algorithm: str
    ranks: int
    bucket_bytes: int
    ops: int = 1
    compute_s: Sequence[Sequence[float]] = ()
    """[op][rank]: how long a rank computes after the previous op before it enters this one."""
    freezes: Sequence[Freeze] = ()
    """Processes that stand still while their kernels go on. Without an end, the whole host is gone."""
    hangs: Sequence[Hang] = ()
    segment_bytes: int = 1448
    """The payload of a packet: the MTU less 52 bytes of IP and TCP headers."""
    part_bytes: int = 256 << 10
    """Buckets and shards travel in parts of this size, each as soon as it is complete."""
    receive_buffer_bytes: int = 6 << 20
    """The receive buffer of every connection. Linux tunes it up to 6 MiB. A larger one helps on long
    paths."""
    least_rto_s: float = 0.2
    """The shortest retransmission timeout, as in Linux. A shorter one recovers faster if a tail probe is lost
    too."""
    give_up_s: float = 60.0
    """The simulation ends if no op has ended for this long: the group waits for a rank that is gone."""

    def __post_init__(self) -> None:
        self.check_network()
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm={self.algorithm!r} must be one of {', '.join(ALGORITHMS)}")
        if not 1 <= self.ranks <= 4096:
            raise ConfigError(f"ranks={self.ranks} must be between 1 and 4096")
        if self.bucket_bytes < 0 or self.part_bytes < 1 or self.segment_bytes < 1:
            raise ConfigError("bucket_bytes must not be negative, part_bytes and segment_bytes at least 1")
        if self.compute_s and np.shape(self.compute_s) != (self.ops, self.ranks):
            raise ConfigError(f"compute_s has shape {np.shape(self.compute_s)}, not (ops, ranks)")


def simulate_baseline(
    baseline: Baseline, progress: Callable[[int], None] | None = None
) -> _native.BaselineResult:
    """Run it. ``progress`` is told now and then how many ops have ended, over all ranks."""
    spec = _native.BaselineSpec()
    baseline.fill(spec)
    spec.ranks = baseline.ranks
    spec.algorithm = ALGORITHMS[baseline.algorithm]
    spec.bucket_bytes = baseline.bucket_bytes
    spec.part_bytes = baseline.part_bytes
    spec.set_transport(
        segment_bytes=baseline.segment_bytes,
        header_bytes=TCP_HEADER_BYTES,
        receive_buffer_bytes=baseline.receive_buffer_bytes,
        least_rto_ns=ns(baseline.least_rto_s),
    )
    spec.compute_ns = [[ns(s) for s in row] for row in baseline.compute_s] or [
        [0] * baseline.ranks
    ] * baseline.ops
    spec.give_up_ns = ns(baseline.give_up_s)
    for freeze in baseline.freezes:
        until_ns = None if freeze.until_s is None else ns(freeze.until_s)
        spec.freeze(freeze.rank, ns(freeze.from_s), until_ns)
    for hang in baseline.hangs:
        spec.hang(hang.rank, ns(hang.from_s), ns(hang.until_s))
    return _native.simulate_baseline(spec, progress)
