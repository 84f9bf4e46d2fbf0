"""The trimming switch in the kernel: loads trim.bpf.c, tells each port its rules, reads its counters."""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from tailcut.errors import ConfigError
from tailcut.tools.testbed import bpf, system
from tailcut.tools.testbed.counters import PortCounters
from tailcut.tools.testbed.record import Record
from tailcut.tools.testbed.scenario import ANY, Switch
from tailcut.tools.testbed.topology import TRIMMED_CLASS, SwitchPort
from tailcut.tools.testbed.virtual_queue import as_threshold, first_random, ns_per_byte_q10

_RULES = struct.Struct("=QQQ6I3H3B7x")
_PORT = struct.Struct("=II" + 13 * "Q")
_NEVER_BYTES = 1 << 36
_ANY_DSCP = 0xFF


class BpfSwitch:
    description = "BPF in the kernel"
    forwarded: Collection[str] = ()

    def __init__(self, ports: Sequence[SwitchPort], record: Record, seed: int) -> None:
        directory = record.bpf_directory
        pinned = _loaded(directory)
        self._ports = ports
        self._counted = bpf.PinnedMap(directory / "ports")
        rules = bpf.PinnedMap(directory / "rules")
        for port in ports:
            self._counted.write(port.index, _PORT.pack(0, 0, first_random(seed, port.name), *[0] * 12))
            rules.write(port.index, packed_rules(port))
        rules.close()
        lines = [f"qdisc add dev {port.name} clsact" for port in ports]
        lines += [f"filter add dev {port.name} egress bpf direct-action pinned {pinned}" for port in ports]
        system.batch("tc", lines, record.switch)

    def counters(self) -> list[PortCounters]:
        now_ns = time.monotonic_ns()
        return [_unpacked(port, self._counted.read(port.index, _PORT.size), now_ns) for port in self._ports]

    def close(self) -> None:
        self._counted.close()


def _loaded(directory: Path) -> Path:
    """Compile the program, mount a file system for it, and pin it there with its maps."""
    try:
        program = bpf.compiled("trim.bpf.c")
        directory.mkdir()
        system.run("mount", "-t", "bpf", "bpf", str(directory))
        pinned = directory / "trim"
        kind = ("type", "classifier")
        system.run("bpftool", "prog", "load", str(program), str(pinned), *kind, "pinmaps", str(directory))
    except ConfigError as error:
        raise ConfigError(f"{error}; or use --switch forwarder, which needs no BPF") from error
    return pinned


def packed_rules(port: SwitchPort) -> bytes:
    """Pack the rules as struct rules of trim.bpf.c."""
    rules: Switch = port.rules
    bursty = rules.bursty_loss
    chances = (rules.loss_frac, rules.trim_frac) + (
        (bursty.enter_frac, bursty.leave_frac, bursty.loss_frac) if bursty else (0.0, 0.0, 0.0)
    )
    return _RULES.pack(
        ns_per_byte_q10(port.rate_mbit_s),
        _NEVER_BYTES if rules.trim_above_bytes is None else rules.trim_above_bytes,
        port.queue_bytes,
        *map(as_threshold, chances),
        TRIMMED_CLASS,
        *rules.trimmable_ports,
        rules.trim_frame_bytes,
        _ANY_DSCP if rules.trimmable_dscp == ANY else rules.trimmable_dscp,
        rules.trimmed_dscp,
        rules.lengths == "fix-lengths",
    )


def _unpacked(port: SwitchPort, raw: bytes, now_ns: int) -> PortCounters:
    """Unpack struct port of trim.bpf.c. The queue has drained since its last packet."""
    _, _, _, last_ns, backlog_q10, *counts, max_backlog_q10 = _PORT.unpack(raw)
    packets, length, trimmed, at_random, full, lost, in_bursts, supers, failed = counts
    unit = ns_per_byte_q10(port.rate_mbit_s)
    left_q10 = max(0, backlog_q10 - (max(0, now_ns - last_ns) << 10))
    return PortCounters(
        port.name,
        packets,
        length,
        left_q10 // unit,
        max_backlog_q10 // unit,
        trimmed,
        at_random,
        full,
        lost,
        in_bursts,
        supers,
        failed,
    )
