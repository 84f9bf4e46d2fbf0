"""Creates hosts and a switch, which are all network namespaces, with ip, tc and bridge.

It owns names and addresses inside a testbed. What the switch does to packets is attached elsewhere.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from tailcut.errors import ConfigError
from tailcut.tools.testbed import system
from tailcut.tools.testbed.record import Record
from tailcut.tools.testbed.scenario import HostScenario, Port, Switch

FIRST_INDEX = 100
"""The interface index of port 0 in the switch. The others follow."""
TRIMMED_CLASS = 0x0001_0010
"""The number in skb->priority that makes htb choose class 1:10."""
SLACK_BYTES = 8_000_000
"""A real queue is longer by this much than the virtual one before it: a late machine drops nothing."""
BURST_S = 0.002
"""The default of Port.burst_bytes, in time."""
MOST_GSO_BYTES = 65_536
"""The kernel's own limit of a super-packet."""
UPLINK_PACKETS = 1000
"""What a host queues before its link, as txqueuelen does."""


@dataclass(frozen=True)
class SwitchPort:
    """One way out of the switch, to a host or to the other site."""

    number: int
    name: str
    rate_mbit_s: float
    queue_bytes: int
    mtu_bytes: int
    burst_bytes: int
    rules: Switch
    delay_s: float | None = None
    """The base delay of the link to the other site. A port that leads to a host has none."""

    @property
    def index(self) -> int:
        return FIRST_INDEX + self.number


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def shadow_address(host: int) -> str:
    """Return an address that nobody has behind a host's port. Traffic to it loads only the link."""
    return f"10.77.0.{host + 129}"


def neighbour_address(host: int) -> str:
    """Return the address of the neighbour behind the port of a host."""
    return f"10.77.0.{host + 65}"


def _mac(host: int) -> str:
    return f"02:7a:11:00:00:{host + 1:02x}"


def _shadow_mac(host: int) -> str:
    return f"02:7a:11:00:01:{host + 1:02x}"


def switch_ports(scenario: HostScenario) -> list[SwitchPort]:
    """Return p0, p1, ... to the hosts, and then w0 and w1 from each site to the other."""
    port, hosts = scenario.port, scenario.hosts
    mtu = port.mtu_bytes
    rates = [scenario.rate_frac(i) * port.rate_mbit_s for i in range(hosts)]
    ports = [
        SwitchPort(i, f"p{i}", rate, port.queue_bytes, mtu, _burst_bytes(port, rate), scenario.switch)
        for i, rate in enumerate(rates)
    ]
    if wan := scenario.wan:
        rules = Switch(loss_frac=wan.loss_frac)
        burst = _burst_bytes(port, wan.rate_mbit_s)
        ports += [
            SwitchPort(hosts + s, f"w{s}", wan.rate_mbit_s, wan.queue_bytes, mtu, burst, rules, wan.delay_s)
            for s in (0, 1)
        ]
    return ports


def site(scenario: HostScenario, host: int) -> int:
    return int(scenario.wan is not None and host >= (scenario.hosts + 1) // 2)


def build(scenario: HostScenario, record: Record, *, forwarded: bool, virtual: Collection[str]) -> None:
    """Create everything. With ``forwarded``, processes will sit between the bridge and the ports to hosts.

    ``virtual`` are the ports with a virtual queue before the real one, which then decides what is dropped.
    """
    hosts = range(scenario.hosts)
    namespaces = [record.switch, record.background, *(record.host(i) for i in hosts)]
    namespaces += [record.neighbour(i) for i in hosts if scenario.has_neighbours]
    system.batch("ip", [f"netns add {name}" for name in namespaces])
    system.batch("ip", _switch_lines(scenario, record, forwarded), record.switch)
    shapers = [_shaper_lines(port, port.name in virtual) for port in switch_ports(scenario)]
    system.batch("tc", list(chain.from_iterable(shapers)), record.switch)
    member = "q" if forwarded else "p"
    shadows = [f"fdb add {_shadow_mac(i)} dev {member}{i} master static" for i in hosts]
    system.batch("bridge", shadows, record.switch)
    _set_up_hosts(scenario, record)


def _switch_lines(scenario: HostScenario, record: Record, forwarded: bool) -> list[str]:
    mtu = scenario.port.mtu_bytes
    lines = []
    for bridge in ("br0", "br1") if scenario.wan else ("br0",):
        lines += [
            f"link add {bridge} mtu {mtu} type bridge stp_state 0 forward_delay 0 mcast_snooping 1",
            # Until the default of 10 s has passed after the querier's start, a bridge floods multicast.
            f"link set {bridge} type bridge mcast_query_response_interval 50 mcast_startup_query_interval 50",
            f"link set {bridge} type bridge mcast_querier 1",
            f"link set {bridge} addrgenmode none up",
        ]
    for i in range(scenario.hosts):
        bridge = f"br{site(scenario, i)}"
        peer = f"peer name eth0 mtu {mtu} address {_mac(i)} netns {record.host(i)}"
        lines.append(f"link add p{i} index {FIRST_INDEX + i} mtu {mtu} type veth {peer}")
        lines += _cable(f"q{i}", f"f{i}", mtu) if forwarded else []
        lines += [
            f"link set p{i} addrgenmode none up",
            f"link set {'q' if forwarded else 'p'}{i} master {bridge}",
        ]
    if scenario.wan:
        for s in (0, 1):
            lines += _cable(f"w{s}", f"x{s}", mtu, FIRST_INDEX + scenario.hosts + s)
            lines.append(f"link set w{s} master br{s}")
    lines += [
        f"link add b0 mtu {mtu} type veth peer name eth0 mtu {mtu} netns {record.background}",
        "link set b0 addrgenmode none master br0 up",
    ]
    return lines


def _cable(near: str, far: str, mtu_bytes: int, index: int | None = None) -> list[str]:
    chosen = "" if index is None else f"index {index} "
    return [
        f"link add {near} {chosen}mtu {mtu_bytes} type veth peer name {far} mtu {mtu_bytes}",
        *(f"link set {name} addrgenmode none up" for name in (near, far)),
    ]


def _shaper_lines(port: SwitchPort, virtual: bool) -> list[str]:
    """Make a rate limit with two queues. A class wins while it is within its own rate. The class of trimmed
    packets has the whole link as its rate, the other borrows, and the parent limits the sum."""
    rate = f"{round(port.rate_mbit_s * 1e6)}bit"
    burst = f"burst {port.burst_bytes} cburst {port.burst_bytes} quantum {2 * port.mtu_bytes}"
    little = f"{max(8000, round(port.rate_mbit_s * 1e6 / 50))}bit"
    limit = f"bfifo limit {port.queue_bytes + (SLACK_BYTES if virtual else 0)}"
    dev = f"dev {port.name}"
    return [
        f"qdisc add {dev} root handle 1: htb default 20",
        f"class add {dev} parent 1: classid 1:1 htb rate {rate} {burst}",
        f"class add {dev} parent 1:1 classid 1:10 htb rate {rate} ceil {rate} {burst} prio 0",
        f"class add {dev} parent 1:1 classid 1:20 htb rate {little} ceil {rate} {burst} prio 1",
        f"qdisc add {dev} parent 1:10 handle 10: {limit}",
        f"qdisc add {dev} parent 1:20 handle 20: {limit}",
    ]


def _burst_bytes(port: Port, rate_mbit_s: float) -> int:
    """Return what a link of that rate may send at once."""
    return port.burst_bytes or max(2 * (port.mtu_bytes + 14), round(rate_mbit_s * 1e6 / 8 * BURST_S))


_PREPARE = """
cd /proc/sys/net/bridge 2>/dev/null && for name in iptables ip6tables arptables; do
    echo 0 >bridge-nf-call-$name
done 2>/dev/null
[ "$1" = switch ] && exit 0
set -e
"$1" -batch -
"$2" -K eth0 $5 >/dev/null
[ -z "$4" ] || "$3" $4
"""
"""This runs inside a namespace. Bridges call no firewall, which would take 1.9 µs a packet."""
SINGLE_PACKETS = "tx off tso off gso off gro off"
"""Hosts send finished packets of one segment, so that trimming or losing one touches no others, and receivers
check sums."""
SUPER_PACKETS = "tx on tso on gso on gro on"
"""Many segments to the same host cross the switch as one packet, as network cards make and take them. Without
this, the processor that all hosts share spends 26 µs a packet, and is measured instead of the links."""


def _set_up_hosts(scenario: HostScenario, record: Record) -> None:
    programs = [system.program(name) for name in ("ip", "ethtool", "tc")]
    offloads = SUPER_PACKETS if scenario.carries_super_packets else SINGLE_PACKETS
    hosts = [(record.host(i), _host_lines(scenario, i), _uplink(scenario, i)) for i in range(scenario.hosts)]
    work: list[tuple[str, list[str], list[str]]] = [(record.switch, [], ["switch"])]
    work += [(name, lines, [*programs, uplink, offloads]) for name, lines, uplink in hosts]
    others = [(record.background, _background_lines(scenario))]
    if scenario.has_neighbours:
        _add_neighbours(scenario, record)
        others += [(record.neighbour(i), _neighbour_lines(i)) for i in range(scenario.hosts)]
    work += [(name, lines, [*programs, "", SINGLE_PACKETS]) for name, lines in others]
    running = []
    for name, lines, arguments in work:
        process = subprocess.Popen(
            [programs[0], "netns", "exec", name, "sh", "-c", _PREPARE, "sh", *arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append((name, lines, process))
    for name, lines, process in running:
        _, stderr = process.communicate("".join(f"{line}\n" for line in lines))
        if process.returncode:
            raise ConfigError(f"setting up {name} failed: {stderr.strip()}")


def _host_lines(scenario: HostScenario, host: int) -> list[str]:
    # A link that is handed more than it may send at once has to take it apart again.
    at_once = _burst_bytes(scenario.port, scenario.rate_frac(host) * scenario.port.rate_mbit_s)
    return [
        "link set lo up",
        f"link set eth0 gso_max_size {min(MOST_GSO_BYTES, at_once)}",  # without effect on single packets
        f"addr add {address(host)}/24 broadcast + dev eth0",
        "link set eth0 addrgenmode none up",
        "route add 224.0.0.0/4 dev eth0",
    ]


def _add_neighbours(scenario: HostScenario, record: Record) -> None:
    """Give each host's link a second address, in a namespace of its own. Both share the port, both ways."""
    for i in range(scenario.hosts):
        place = f"link eth0 netns {record.neighbour(i)} type macvlan mode private"
        mtu = scenario.port.mtu_bytes
        system.batch("ip", [f"link add name eth0 mtu {mtu} {place}"], record.host(i))


def _neighbour_lines(host: int) -> list[str]:
    return [
        "link set lo up",
        f"addr add {neighbour_address(host)}/24 dev eth0",
        "link set eth0 addrgenmode none up",
    ]


def _uplink(scenario: HostScenario, host: int) -> str:
    port = scenario.port
    rate_mbit_s = scenario.rate_frac(host) * port.uplink
    if not rate_mbit_s:
        return ""
    rate = f"{round(rate_mbit_s * 1e6)}bit burst {_burst_bytes(port, rate_mbit_s)}"
    return f"qdisc add dev eth0 root tbf rate {rate} limit {UPLINK_PACKETS * port.mtu_bytes}"


def _background_lines(scenario: HostScenario) -> list[str]:
    lines = ["link set lo up", "addr add 10.77.0.254/24 dev eth0", "link set eth0 addrgenmode none up"]
    return lines + [
        f"neigh add {shadow_address(i)} lladdr {_shadow_mac(i)} dev eth0 nud permanent"
        for i in range(scenario.hosts)
    ]
