"""The configuration of a group: frozen, keyword-only, validated once.

Each field comes from the argument, else from ``TAILCUT_<FIELD>``, else from the default. Fields that every
rank must agree on are compared when the group opens.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tailcut.errors import ConfigError

T = TypeVar("T")

CODECS = ("auto", "planes", "raw")
MULTICAST = ("auto", "on", "off")
OVER_BUDGET = ("proceed", "wait", "skip", "raise")
LEAST_TRIM_BYTES = 114
"""Ethernet, IPv4 and UDP headers (42), the header (64), and the first plane of one granule (8)."""


def _setting(name: str, convert: Callable[[str], T], default: T | Callable[[], T]) -> Any:
    variable = f"TAILCUT_{name.upper()}"

    def read() -> T:
        text = os.environ.get(variable)
        if text is None:
            return default() if callable(default) else default
        try:
            return convert(text)
        except ValueError:
            raise ConfigError(f"{variable}={text!r} is not a valid {convert.__name__.lstrip('_')}") from None

    return field(default_factory=read)


def flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError
    return text.lower() in ("1", "true")


def _gloo_interface() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a group behaves. Defaults suit ranks that are at most a few seconds apart."""

    deadline_s: float = _setting("deadline_s", float, 10.0)
    """Hard end of an op, from the rank's own entry. Lower: shorter waits for slow ranks, more loss."""

    window_ops: int = _setting("window_ops", int, 64)
    """Ops a rank may be behind and still find its results; at least twice what it keeps in flight.
    Higher: more history kept. Agreed."""

    pool_bytes: int = _setting("pool_bytes", int, 256 << 20)
    """Fixed memory for ops not reached yet and for results that late peers need; pages are used on demand.
    An op fits when twice its bucket does. Lower: a late rank loses more."""

    receive_buffer_bytes: int = _setting("receive_buffer_bytes", int, 4 << 20)
    """Socket buffer to ask for (the kernel may grant less); 0 leaves the system's. Higher: more in flight.
    4 MiB holds 13 large datagrams from each of 7 peers; below 4 each, throughput falls."""

    packet_bytes: int = _setting("packet_bytes", int, 0)
    """Largest payload of a packet; 0 follows the path MTU. Lower: finer loss, more cost per byte."""

    codec: str = _setting("codec", str, "auto")
    """How values travel: "raw" (fp32, exact), "planes" (rotated bit planes that may be trimmed), or "auto":
    planes if the ranks are on more than one host, where bytes cost more than time to encode. Agreed."""

    planes: int = _setting("planes", int, 0)
    """Bits a coordinate of codec planes; 0: what makes steps shortest within ``budget`` (docs/budget.md). 1
    to 16 fix it. 16 err by 1e-9 of the squared norm of each block of 32,768 neighbours (coordinates far below
    it lose precision); fewer send less and err more: 4 by 1 %, 1 by 57 % of each rank's vector. The
    backend "tailcut", which averages more than gradients, takes 0 for 16 unless ``bound_sums`` is set."""

    budget: float = _setting("budget", float, 0.05)
    """ε that planes and the network may add to the mean gradient: 0.05 costs at most 5 % more rounds. Higher:
    fewer planes, shorter steps."""

    over_budget: str = _setting("over_budget", str, "proceed")
    """If the network forces more: "proceed" (go on and report), "wait" (as ``deadline_s`` allows), "skip"
    (owners that lack more send nothing: a zero gradient) or "raise" (``BudgetExceeded``)."""

    trim_bytes: int = _setting("trim_bytes", int, 0)
    """Shortest frame that a switch leaves of a trimmed packet: packets hold so few coordinates that it keeps
    the first plane of all. 0: nothing trims on the way, as on nearly all networks, and packets fill the MTU.
    256 is what switches do that trim."""

    dscp: int = _setting("dscp", int, 0)
    """Mark of packets of codec planes, 0 to 63: switches tell by it what they may trim. 0: none."""

    lanes: int = _setting("lanes", int, 1)
    """Engine threads, each with a socket and a pool. More than one only helps with idle cores. Agreed."""

    rows: int = _setting("rows", int, 0)
    """Rows of neighbours into which the ranks are cut (docs/grid.md): a rank then talks to its row and to one
    rank of each other row. 0: as many as a row is long, from 128 ranks on; 1: all talk to all. Agreed."""

    resend: bool = _setting("resend", flag, True)
    """Send lost packets again while the stage is open. Off: what is lost stays lost."""

    adaptive: bool = _setting("adaptive", flag, True)
    """Wait little longer than the stages of earlier ops took; ``deadline_s`` stays the end (docs/time.md).
    Off: contributions are waited for until half of the deadline, means until its end."""

    straggler_share: float = _setting("straggler_share", float, 0.2)
    """Warn of a rank whose contribution is unused in more than this share of ops. Lower: sooner; 1: never."""

    seed: int = _setting("seed", int, 0)
    """Where everything random derives from. Agreed."""

    address: str = _setting("address", str, "")
    """IPv4 address to bind and publish; empty: that of ``socket_ifname``."""

    socket_ifname: str = _setting("socket_ifname", str, _gloo_interface)
    """Interface to use; empty tries all and takes what answers. Default: that of ``GLOO_SOCKET_IFNAME``."""

    multicast: str = _setting("multicast", str, "off")
    """Whether means go to all peers in one datagram: "off"; "auto", to those that hear it, if at least two
    do; "on", to one alone, too. Peers that do not hear it get theirs by unicast in any case. It helps where
    hosts can receive more than they can send; elsewhere ports are as full, and it costs time. Agreed."""

    multicast_ttl: int = _setting("multicast_ttl", int, 1)
    """How many networks multicast crosses, less one. More than 1 needs routers that know of it."""

    bound_from_bytes: int = _setting("bound_from_bytes", int, 1 << 16)
    """As a backend: smaller tensors are reduced by Gloo, exactly. Lower: more is bounded. Agreed."""

    bound_sums: bool = _setting("bound_sums", flag, False)
    """As a backend: bound SUM like AVG, for DDP without ``attach``. Leave it off for groups that sum counts.
    Agreed."""

    rendezvous_s: float = _setting("rendezvous_s", float, 60.0)
    """How long opening a group waits for the other ranks."""

    offload: bool = _setting("offload", flag, True)
    """Use UDP segmentation offload (GSO, GRO) where the kernel has it."""

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s <= 3600:
            raise ConfigError(f"deadline_s={self.deadline_s} must be above 0 and at most 3600 seconds")
        if not 1 <= self.window_ops <= 1 << 16:
            raise ConfigError(f"window_ops={self.window_ops} must be between 1 and 65536")
        if self.pool_bytes < 1 << 16:
            raise ConfigError(f"pool_bytes={self.pool_bytes} is below the smallest useful pool, 65536")
        if not 0 <= self.receive_buffer_bytes <= 1 << 30:
            raise ConfigError(f"receive_buffer_bytes={self.receive_buffer_bytes} must be between 0 and 2**30")
        if self.packet_bytes and not 256 <= self.packet_bytes <= 65_280:
            raise ConfigError(f"packet_bytes={self.packet_bytes} must be 0 or between 256 and 65280")
        if self.codec not in CODECS:
            raise ConfigError(f"codec={self.codec!r} is unknown; take one of {', '.join(map(repr, CODECS))}")
        if not 0 <= self.planes <= 16:
            raise ConfigError(f"planes={self.planes} must be 0, or between 1 and 16 bits a coordinate")
        if not 0 < self.budget <= 10:
            raise ConfigError(f"budget={self.budget} must be above 0 and at most 10; 0.05 is 5 % more rounds")
        if self.over_budget not in OVER_BUDGET:
            known = ", ".join(map(repr, OVER_BUDGET))
            raise ConfigError(f"over_budget={self.over_budget!r} is unknown; take one of {known}")
        if self.trim_bytes and not LEAST_TRIM_BYTES <= self.trim_bytes <= 65_535:
            raise ConfigError(
                f"trim_bytes={self.trim_bytes} must be 0, or between 65535 and {LEAST_TRIM_BYTES}, which "
                "holds the headers and the first plane of 64 coordinates"
            )
        if not 0 <= self.dscp < 64:
            raise ConfigError(f"dscp={self.dscp} must be between 0 and 63")
        if not 1 <= self.lanes <= 64:
            raise ConfigError(f"lanes={self.lanes} must be between 1 and 64")
        if self.rows < 0:
            raise ConfigError(f"rows={self.rows} must not be negative; 0 chooses")
        if not 0 <= self.straggler_share <= 1:
            raise ConfigError(f"straggler_share={self.straggler_share} must be between 0 and 1")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed={self.seed} must be between 0 and 2**64 - 1")
        if self.address:
            try:
                ipaddress.IPv4Address(self.address)
            except ValueError:
                raise ConfigError(f"address={self.address!r} is not an IPv4 address") from None
        if self.multicast not in MULTICAST:
            known = ", ".join(map(repr, MULTICAST))
            raise ConfigError(f"multicast={self.multicast!r} is unknown; take one of {known}")
        if not 1 <= self.multicast_ttl <= 255:
            raise ConfigError(f"multicast_ttl={self.multicast_ttl} must be between 1 and 255")
        if self.bound_from_bytes < 0:
            raise ConfigError(f"bound_from_bytes={self.bound_from_bytes} must not be negative")
        if not self.rendezvous_s > 0:
            raise ConfigError(f"rendezvous_s={self.rendezvous_s} must be above 0")

    @property
    def agreed(self) -> dict[str, int | str]:
        """What every rank of a group must have alike."""
        names = (
            *("window_ops", "lanes", "seed", "codec", "multicast", "rows"),
            *("bound_from_bytes", "bound_sums"),
        )
        return {name: getattr(self, name) for name in names}
