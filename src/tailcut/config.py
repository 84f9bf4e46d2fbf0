"""The configuration of a group: frozen, keyword-only, validated once.

Each field comes from the argument, else from ``TAILCUT_<FIELD>``, else from the default. The docstring of a
field is its line in docs/configuration.md (``make docs``).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

from tailcut.errors import ConfigError

T = TypeVar("T")

LEAST_TRIM_BYTES = 114
"""Ethernet, IPv4 and UDP headers (42), the header (64), and the first plane of one granule (8)."""


class Allowed(NamedTuple):
    """Which values a field may have."""

    says: str
    """Completes the sentence "it must be"."""
    holds: Callable[[Any], bool]


def _between(least: float, most: float) -> Allowed:
    return Allowed(f"between {least} and {most}", lambda value: least <= value <= most)


def _above(bound: float, most: float = float("inf")) -> Allowed:
    limit = f" and at most {most}" if most < float("inf") else ""
    return Allowed(f"above {bound}{limit}", lambda value: bound < value <= most)


def _at_least(least: int) -> Allowed:
    return Allowed(f"at least {least}", lambda value: value >= least)


def _zero_or(allowed: Allowed) -> Allowed:
    return Allowed(f"0 or {allowed.says}", lambda value: value == 0 or allowed.holds(value))


def _one_of(*choices: str) -> Allowed:
    return Allowed(f"one of {', '.join(map(repr, choices))}", lambda value: value in choices)


def _is_ipv4_or_empty(value: str) -> bool:
    try:
        return value == "" or bool(ipaddress.IPv4Address(value))
    except ValueError:
        return False


_IPV4_OR_EMPTY = Allowed("an IPv4 address or empty", _is_ipv4_or_empty)
_YES_OR_NO = Allowed("True or False", lambda value: value in (True, False))
_TEXT = Allowed("a string", lambda value: isinstance(value, str))


def _is_patterns(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(entry, str) and entry for entry in value)


_PATTERNS = Allowed("a tuple of patterns", _is_patterns)


def _setting(
    name: str,
    convert: Callable[[str], T],
    default: T | Callable[[], T],
    allowed: Allowed,
    *,
    agreed: bool = False,
) -> Any:
    """A field that comes from its variable, else from the default. ``agreed``: all ranks must agree on it."""
    variable = f"TAILCUT_{name.upper()}"

    def read() -> T:
        text = os.environ.get(variable)
        if text is None:
            return default() if callable(default) else default
        try:
            return convert(text)
        except ValueError:
            raise ConfigError(f"{variable}={text!r} is not a valid {convert.__name__}") from None

    return field(default_factory=read, metadata={"default": default, "allowed": allowed, "agreed": agreed})


def flag(text: str) -> bool:
    """What a variable says: yes or no."""
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError
    return text.lower() in ("1", "true")


def patterns(text: str) -> tuple[str, ...]:
    """What a variable lists, separated by commas."""
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def gloo_interface() -> str:
    """The first interface that ``GLOO_SOCKET_IFNAME`` names."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a group behaves. The defaults suit ranks that are at most a few seconds apart."""

    deadline_s: float = _setting("deadline_s", float, 10.0, _above(0, 3600))
    """An op ends at the latest this long after the rank's own call. A lower value waits less for slow ranks
    and loses more."""

    window_ops: int = _setting("window_ops", int, 1024, _between(1, 1 << 16), agreed=True)
    """A rank may be this many ops behind and still finds its results, as far as ``pool_bytes`` holds them.
    With ``attach`` it is for steps of four buckets, and grows with the buckets of the model. Make it at least
    twice the number of ops that a rank keeps in flight. A higher value keeps more history."""

    pool_bytes: int = _setting("pool_bytes", int, 256 << 20, _at_least(1 << 16))
    """The most memory for ops that this rank has not reached and for results that late peers need. It is
    taken only when it is used. An op fits when twice its bucket fits. With a lower value a late rank loses
    more."""

    receive_buffer_bytes: int = _setting("receive_buffer_bytes", int, 4 << 20, _between(0, 1 << 30))
    """The socket buffer to ask the kernel for, which may grant less; 0 leaves the system's. A higher value
    allows more packets in flight. 4 MiB hold 13 large datagrams from each of 7 peers; below 4 datagrams from
    each, throughput falls."""

    packet_bytes: int = _setting("packet_bytes", int, 0, _zero_or(_between(256, 65_280)))
    """The largest payload of a packet; 0 follows the MTU of the path. With a lower value a lost packet costs
    less, and every byte costs more."""

    codec: str = _setting("codec", str, "auto", _one_of("auto", "planes", "raw"), agreed=True)
    """How values travel. "raw" is exact 32-bit floating point. "planes" is rotated bit planes, which a switch
    may trim. "auto" takes planes if the ranks are on more than one host: there bytes cost more than the time
    to encode them."""

    planes: int = _setting("planes", int, 0, _between(0, 16))
    """How many bits of every coordinate the codec planes sends. 0 chooses what makes steps shortest within
    ``budget`` (docs/budget.md). 16 err by 1e-9 of the squared norm of each block of 32,768 neighbours, so
    coordinates far below that norm lose precision. Fewer planes send less and err more: 4 err by 1 % of each
    rank's vector, 1 errs by 57 %. The backend "tailcut" averages more than gradients, so it takes 0 for 16
    unless ``bound_sums`` is set."""

    budget: float = _setting("budget", float, 0.05, _above(0, 10))
    """The error ε that planes and the network may add to the mean gradient: 0.05 costs at most 5 % more
    rounds. A higher value sends fewer planes and makes steps shorter."""

    over_budget: str = _setting("over_budget", str, "proceed", _one_of("proceed", "wait", "skip", "raise"))
    """What happens if the network forces more than ``budget``. "proceed" goes on and reports it. "wait" waits
    longer, up to ``deadline_s``. With "skip", owners that lack more send nothing, which is a zero gradient.
    "raise" raises ``BudgetExceeded``."""

    trim_bytes: int = _setting("trim_bytes", int, 0, _zero_or(_between(LEAST_TRIM_BYTES, 65_535)))
    """The shortest frame that a switch leaves of a trimmed packet; switches that trim commonly leave 256.
    Packets then hold so few coordinates that the first plane of all of them is kept. The least value holds
    the headers and the first plane of 64 coordinates. 0 says that this is not known: packets fill the MTU
    until some are trimmed, and then, with ``planes=0``, fit 256 bytes of a frame."""

    receive_uncorrected: bool = _setting("receive_uncorrected", flag, False, _YES_OR_NO)
    """Whether to receive, by an AF_PACKET socket, also what a switch trims without correcting its lengths.
    Without it such packets are lost, because the kernel drops them. With it they count, but that socket is in
    front of the firewall, checks no checksums, and needs CAP_NET_RAW."""

    dscp: int = _setting("dscp", int, 0, _between(0, 63))
    """The DSCP mark of packets of codec planes, by which a switch knows what it may trim. 0 sets no mark."""

    lanes: int = _setting("lanes", int, 1, _between(1, 64), agreed=True)
    """The number of engine threads, each with its own socket and pool. More than one helps only where cores
    are idle."""

    rows: int = _setting("rows", int, 0, _at_least(0), agreed=True)
    """The number of rows into which the ranks are cut (docs/grid.md). A rank then talks to its own row and to
    one rank of each other row. With 1 all ranks talk to all. 0 takes 1 below 128 ranks, and from there on
    about as many rows as a row is long."""

    drift_bound: float = _setting("drift_bound", float, 1e-2, _at_least(0), agreed=True)
    """With ``attach``: how far a replica may be from the others, relative to the norm of its parameters.
    Blocks that differ are copied in turns, and all within 8 steps beyond half of this (docs/resync.md).
    Late parts that are still to come make a few thousandths of the norm. A lower value copies sooner; 0
    compares and copies nothing."""

    resend: bool = _setting("resend", flag, True, _YES_OR_NO)
    """Whether lost packets are sent again while their stage is open. Without it, what is lost stays lost."""

    late: str = _setting("late", str, "carry", _one_of("carry", "discard"), agreed=True)
    """What becomes of contributions and means that come after their stage has ended. "carry" adds them to the
    next op of the same bucket, so that nothing is lost in the end (docs/late.md). "discard" drops them. Only
    buckets with a key are carried, which those of ``attach`` have. Groups in rows discard."""

    residue: str = _setting("residue", str, "auto", _one_of("auto", "carry", "discard"), agreed=True)
    """What becomes of what coding takes from contributions and means. "carry" adds it to the next op of the
    same bucket, so that fewer planes fit ``budget``; it needs ``late="carry"``, and memory for another copy
    of the gradients. With "discard" it is lost. "auto" carries under ``attach(optimizer=...)`` with SGD
    alone: results vary more from step to step, by which Adam and its like shorten their steps
    (docs/late.md)."""

    rejoin: bool = _setting("rejoin", flag, True, _YES_OR_NO, agreed=True)
    """With ``attach`` and its optimizer: whether a rank that is more than ``window_ops`` behind fetches the
    state of the others and goes on there (docs/resync.md). Without it the rank gets a ``BehindError``."""

    reliable: tuple[str, ...] = _setting("reliable", patterns, (), _PATTERNS, agreed=True)
    """With ``attach``: patterns of the names of parameters, such as ``("*.norm.*",)``; the variable has them
    separated by commas. Blocks of 32,768 gradients that hold such a parameter are waited for up to
    ``deadline_s``, while all others end at their bounds (docs/late.md). With more of them, steps are longer
    when the network is in trouble. Groups in rows wait for none."""

    adaptive: bool = _setting("adaptive", flag, True, _YES_OR_NO)
    """Whether an op waits only a little longer than earlier ops took (docs/time.md); ``deadline_s`` stays its
    end. Without it, contributions are waited for until half of the deadline, and means until its end."""

    straggler_share: float = _setting("straggler_share", float, 0.2, _between(0, 1))
    """Warn of a rank whose contribution is unused in more than this share of ops. A lower value warns sooner,
    1 never does."""

    seed: int = _setting("seed", int, 0, _between(0, (1 << 64) - 1), agreed=True)
    """Everything random derives from it."""

    address: str = _setting("address", str, "", _IPV4_OR_EMPTY)
    """The IPv4 address to bind and to publish. If it is empty, ``socket_ifname`` decides."""

    socket_ifname: str = _setting("socket_ifname", str, gloo_interface, _TEXT)
    """The network interface to use. If it is empty, all are tried, and one that answers is taken. The default
    is that of ``GLOO_SOCKET_IFNAME``."""

    multicast: str = _setting("multicast", str, "off", _one_of("auto", "on", "off"), agreed=True)
    """Whether a mean goes to all peers in one datagram. "auto" does so if at least two peers hear it, "on"
    even for one. Peers that do not hear it are served by unicast in any case. It helps where hosts can
    receive more than they can send; elsewhere it costs time."""

    multicast_ttl: int = _setting("multicast_ttl", int, 1, _between(1, 255))
    """The TTL of multicast. 1 stays in the network of the sender; more needs routers that forward it."""

    bound_from_bytes: int = _setting("bound_from_bytes", int, 1 << 16, _at_least(0), agreed=True)
    """As a backend: smaller tensors are reduced by Gloo, exactly. A lower value bounds more."""

    bound_sums: bool = _setting("bound_sums", flag, False, _YES_OR_NO, agreed=True)
    """As a backend: bound SUM as AVG is bounded, for DDP without ``attach``. Leave it off for groups that sum
    counts."""

    ledger: str = _setting("ledger", str, "", _TEXT)
    """The directory in which every rank keeps a file of all losses and decisions (docs/ledger.md). It costs
    some microseconds an op, and a few hundred bytes. Empty keeps none."""

    replay: str = _setting("replay", str, "", _TEXT)
    """The directory of a ledger that is played again in place of a network (docs/ledger.md). It takes as
    many processes on one machine as the run had ranks; ``tailcut replay`` starts them. Empty plays none."""

    replay_dump: str = _setting("replay_dump", str, "", _TEXT)
    """With ``replay``: an op and a file, as ``17:op17.npz``. The replay ends with this op and stores what it
    follows from; ``tailcut replay --op 17 --dump FILE`` sets it. Empty stores nothing."""

    rendezvous_s: float = _setting("rendezvous_s", float, 60.0, _above(0))
    """How long opening a group waits for the other ranks."""

    offload: bool = _setting("offload", flag, True, _YES_OR_NO)
    """Whether to use UDP segmentation offload (GSO, GRO) where the kernel has it."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, allowed = getattr(self, entry.name), entry.metadata["allowed"]
            try:
                fits = allowed.holds(value)
            except TypeError:  # a string for a number
                fits = False
            if not fits:
                raise ConfigError(f"{entry.name}={value!r} must be {allowed.says}")

    @property
    def _timeout(self) -> None:
        """Device meshes of torch ask the options of a backend for it; None is the process group's default."""
        return None

    @property
    def agreed(self) -> dict[str, int | str]:
        """What every rank of a group must have alike."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.metadata["agreed"]}
        return {
            name: ",".join(value) if isinstance(value, tuple) else value for name, value in values.items()
        }


def configured(config: Config | None, settings: Mapping[str, Any]) -> Config:
    """The configuration with these fields replaced, as callers give them beside ``config``."""
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config takes a tailcut.Config, not {type(config).__name__}")
    known = [entry.name for entry in fields(Config)]
    for name in settings:
        if name not in known:
            alike = "".join(f"; did you mean {match}?" for match in get_close_matches(name, known, 1))
            remedy = alike or " (docs/configuration.md has all)"
            raise ConfigError(f"{name!r} is no setting of tailcut{remedy}")
    return Config(**settings) if config is None else replace(config, **settings)
