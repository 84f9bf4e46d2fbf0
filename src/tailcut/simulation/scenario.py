"""The description of a simulated group and its program. network.py describes its network, run.py runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tailcut.codec import CODEC_IDS
from tailcut.config import LEAST_TRIM_BYTES
from tailcut.errors import ConfigError
from tailcut.grid import GridLayout
from tailcut.simulation.network import SimulatedNetwork

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Freeze:
    """A rank stands still from ``from_s`` until ``until_s``; forever if that is None."""

    rank: int
    from_s: float
    until_s: float | None


@dataclass(frozen=True)
class Hang:
    """The program of a rank stands still from ``from_s`` until ``until_s``; its endpoint goes on."""

    rank: int
    from_s: float
    until_s: float
    announced: bool = False
    """Whether it says so before, as a program does that is about to evaluate."""


@dataclass(frozen=True, kw_only=True)
class Scenario(SimulatedNetwork):
    """A group, its program and its network. Times are in seconds, probabilities are per packet."""

    ranks: int
    rows: int = 1
    """The number of rows of a grid; 1 is a flat group."""
    length: int = 1024
    """The number of coordinates of every bucket."""
    ops: int = 1
    deadline_s: float = 0.1
    depth: int = 1
    """The number of ops that a rank keeps in flight."""
    compute_s: Sequence[Sequence[float]] = ()
    """[op][rank]: how long a rank computes before it enters an op. It begins to compute when it has entered
    the previous op and the one ``depth`` before has ended."""
    buckets: int = 0
    """The number of buckets that the ops take in turns. Each has a key, and what is late for it enters its
    next op. With 0 buckets have no keys, and nothing is carried."""
    late: str = "carry"
    """The same as in ``Config``."""
    residue: str = "carry"
    """The same as in ``Config``, but decided."""
    stand_in: bool = True
    """Whether a share of a rank's own gradient stands in for a mean that is late; otherwise zeros do."""
    attendance: bool = True
    """Whether SCATTER awaits only the ranks that were on time in one of the last two ops of the bucket;
    otherwise all that are not silent are awaited in every op."""
    reliable: Sequence[tuple[int, int]] = ()
    """Runs of coordinates of every bucket, as ``Group.allreduce`` takes them."""
    lengths: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Lengths other than ``length``, by op and rank."""
    ops_by_rank: Mapping[int, int] = field(default_factory=dict)
    """The number of ops of ranks that do fewer than ``ops`` and then say goodbye."""
    resync_before: Mapping[int, int] = field(default_factory=dict)
    """By rank: the op before which it declares that its state was copied."""
    loss_scales: Sequence[float] = ()
    """By op: what its values were multiplied by."""
    skips: Sequence[int] = ()
    """Ops whose results nobody applies. A rank that has ended one is told so before it enters its next op."""
    first_seq: int = 0

    freezes: Sequence[Freeze] = ()
    hangs: Sequence[Hang] = ()
    injections: Sequence[tuple[float, int, bytes]] = ()
    """Datagrams that no rank has sent, each with its time and destination."""

    window_ops: int = 64
    pool_bytes: int = 16 << 20
    socket_buffer_bytes: int = 1 << 20
    packet_bytes: int = 1280
    """The largest payload of a packet."""
    codec: str = "raw"
    planes: int = 16
    """Bits of a coordinate. With ``steering``, 0 chooses them from the budget, as a Group does."""
    budget: float = 0.05
    resend: bool = True
    """Lost packets are sent again while their stage is open."""
    paced: bool = False
    """Senders find and keep the rate of each path."""
    multicast: bool = False
    """Whether ranks multicast. All hear it except the ``deaf`` ones."""
    deaf: Sequence[int] = ()
    planes_by_rank: Mapping[int, int] = field(default_factory=dict)
    """The planes of ranks that send other than ``planes``."""
    trim_bytes: int = 0
    """The same as in ``Config``."""
    steering: bool = False
    """Whether ranks adapt their bounds as a Group does, or have fixed shares of ``deadline_s``."""
    epochs: bool = False
    """Whether ranks agree on other owners when one has died (docs/epochs.md), as a Group does. Their store
    answers at once."""
    store_until_s: float = math.inf
    """When the store stops answering."""
    elided: bool = False
    """Whether to leave out the values and compute fates and times only. That allows more ranks and ops than
    memory could hold. Results are zeros."""
    record: bool = False
    """Whether to keep the fate of every packet and the arrival of every granule."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 4096:
            raise ConfigError(f"ranks={self.ranks} must be between 1 and 4096")
        if self.ops < 0 or self.length < 0 or self.depth < 1 or self.window_ops < 1:
            raise ConfigError("ops and length must not be negative, depth and window_ops at least 1")
        if self.buckets and self.depth > self.buckets:
            raise ConfigError(f"depth={self.depth} must be at most buckets={self.buckets}")
        self.check_network()
        if GridLayout(self.ranks, self.rows).rows > 1 and self.multicast:
            raise ConfigError("a grid has no multicast")
        if self.codec not in CODEC_IDS:
            raise ConfigError(f"codec={self.codec!r} must be one of {', '.join(map(repr, CODEC_IDS))}")
        for planes in (self.planes, *self.planes_by_rank.values()):
            if not (0 if self.steering else 1) <= planes <= 16:
                raise ConfigError(f"planes={planes} must be between 1 and 16 bits a coordinate")
        if self.trim_bytes and self.trim_bytes < LEAST_TRIM_BYTES:
            raise ConfigError(f"trim_bytes={self.trim_bytes} must be 0 or at least {LEAST_TRIM_BYTES}")
        if self.packet_bytes < 256:
            raise ConfigError(f"packet_bytes={self.packet_bytes} must be at least 256")
        if len(self.compute_s) and np.shape(self.compute_s) != (self.ops, self.ranks):
            raise ConfigError(f"compute_s has shape {np.shape(self.compute_s)}, not (ops, ranks)")

        if self.loss_scales and len(self.loss_scales) != self.ops:
            raise ConfigError(
                f"loss_scales has {len(self.loss_scales)} entries, not one for each of {self.ops} ops"
            )

    @property
    def carries_coding(self) -> bool:
        """What coding takes enters the next op of its bucket."""
        kept = self.late == self.residue == "carry" and self.codec == "planes" and self.buckets > 0
        return kept and GridLayout(self.ranks, self.rows).rows == 1

    def length_of(self, op: int, rank: int) -> int:
        return self.lengths.get((op, rank), self.length)

    def bucket(self, op: int, rank: int) -> Array:
        """What the rank contributes to the op. It depends on the seed."""
        return np.random.default_rng((self.seed, op, rank)).standard_normal(
            self.length_of(op, rank), np.float32
        )
