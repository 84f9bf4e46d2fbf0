"""A scenario's name means the same in the testbed and in a simulation: what both derive from its TOML."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from itertools import islice, takewhile
from typing import Any

import pytest

from tailcut import ConfigError, _native
from tailcut.simulation.network import Machine, SimulatedNetwork
from tailcut.tools.sim import Options, run
from tailcut.tools.sim.translate import PACKET_COST_S, Conditions, conditions_of
from tailcut.tools.testbed import HostScenario, load_scenario, parse_scenario, shipped_names
from tailcut.tools.testbed.bursts import burst_times
from tailcut.tools.testbed.faults import Event, schedule
from tailcut.tools.testbed.neighbours import gaps_s
from tailcut.tools.testbed.testbed import burst_order, job_orders, neighbour_orders
from tailcut.tools.testbed.topology import neighbour_address, site, switch_ports
from tailcut.tools.testbed.virtual_queue import VirtualQueue
from tests.tables import rows

ALL = pytest.mark.parametrize("name", shipped_names())
UNTIL_S = 100.0
RATE = 25e6


def simulated(scenario: HostScenario) -> Conditions:
    return conditions_of(scenario, ranks=scenario.hosts, until_s=UNTIL_S)


# ---- what is derived ---------------------------------------------------------------------------------------
@ALL
@pytest.mark.parametrize("hosts", [4, 7])
def test_ports_have_the_same_rates_queues_and_losses(name: str, hosts: int) -> None:
    scenario = replace(load_scenario(name), hosts=max(hosts, load_scenario(name).hosts))
    network = simulated(scenario).network
    for host, port in enumerate(switch_ports(scenario)[: scenario.hosts]):
        slow = [change.downlink_factor for change in network.rate_changes if change.host == host]
        assert math.prod([network.bytes_per_s, *slow]) == 1e6 / 8 * port.rate_mbit_s
        assert network.queue_bytes == port.queue_bytes
        assert (network.loss, network.trim) == (port.rules.loss_frac, port.rules.trim_frac)
        assert network.trim_above_bytes == (port.rules.trim_above_bytes or 0)
        assert network.frame_bytes + network.trim_to_bytes == port.rules.trim_frame_bytes
    assert network.uplink_bytes_per_s == 1e6 / 8 * scenario.port.uplink
    assert simulated(scenario).mtu_bytes == scenario.port.mtu_bytes


@ALL
def test_the_same_bytes_come_in_a_burst_and_as_often(name: str) -> None:
    scenario = load_scenario(name)
    order, bursts = burst_order(scenario), simulated(scenario).network.bursts
    assert (order is None) == (bursts is None)
    if order and bursts:
        packets = math.ceil(order["burst_bytes"] / order["payload_bytes"])  # as bursts.Cannon sends them
        assert bursts.packet_bytes == order["payload_bytes"] + 42
        assert bursts.volume_bytes == packets * bursts.packet_bytes
        assert (bursts.gap_min_s, bursts.gap_mean_s) == (order["gap_min_s"], order["gap_mean_s"])


@pytest.mark.parametrize(("name", "burst_mb"), [("tail-1.5", 0.5), ("tail-3", 2.0)])
def test_a_tail_of_k_is_bursts_of_k_minus_1_megabytes_about_once_a_second(name: str, burst_mb: float) -> None:
    """Whatever the op, the ranks and the rate."""
    for ranks, rate_bytes_per_s in ((4, None), (512, 1.25e9)):
        options = Options(scenario=load_scenario(name), ranks=(ranks,), rate_bytes_per_s=rate_bytes_per_s)
        bursts = conditions_of(options.simulated, ranks=ranks, until_s=UNTIL_S).network.bursts
        assert bursts
        assert bursts.volume_bytes == pytest.approx(1e6 * burst_mb, rel=0.03)  # and headers
        assert 0.8 <= bursts.gap_min_s + bursts.gap_mean_s <= 1.0


@ALL
def test_neighbours_have_the_same_flows_and_pauses(name: str) -> None:
    scenario = load_scenario(name)
    orders, flows = neighbour_orders(scenario), simulated(scenario).network.neighbours
    assert bool(orders) == (flows is not None and scenario.jobs is None)
    if orders:
        assert flows
        assert {order["flow_bytes"] for order in orders} == {flows.flow_bytes}
        assert {order["gap_mean_s"] for order in orders} == {flows.gap_mean_s}
        assert sorted(order["port"] for order in orders) == list(range(scenario.hosts))
        drawn = list(islice(gaps_s(0, 0, flows.gap_mean_s), 2000))
        assert sum(drawn) / len(drawn) == pytest.approx(flows.gap_mean_s, rel=0.05)


@pytest.mark.parametrize(("name", "jobs_at_port"), [("jobs-4", 2), ("jobs-16", 8)])
def test_jobs_are_flows_as_many_as_begin_at_a_port(name: str, jobs_at_port: int) -> None:
    scenario = load_scenario(name)
    jobs, flows = scenario.jobs, simulated(scenario).network.neighbours
    assert jobs
    assert flows
    assert (flows.flow_bytes, flows.gap_mean_s) == (jobs.op_bytes, jobs.gap_mean_s / jobs_at_port)
    ends = [host for pair in jobs.pairs(scenario.hosts) for host in pair]
    assert [ends.count(host) for host in range(scenario.hosts)] == [jobs_at_port] * scenario.hosts
    orders = job_orders(scenario)
    for job, (first, last) in enumerate(jobs.pairs(scenario.hosts)):
        assert first != last
        assert job in orders[first]["serves"]
        assert (job, neighbour_address(first)) in orders[last]["joins"]


@ALL
def test_the_link_between_sites_is_the_same(name: str) -> None:
    scenario = load_scenario(name)
    between, wan = switch_ports(scenario)[scenario.hosts :], simulated(scenario).network.wan
    assert bool(between) == (wan is not None)
    for port in between:
        assert wan
        assert (wan.delay_s, wan.loss) == (port.delay_s, port.rules.loss_frac)
        assert (wan.bytes_per_s, wan.queue_bytes) == (1e6 / 8 * port.rate_mbit_s, port.queue_bytes)
        second = [host for host in range(scenario.hosts) if site(scenario, host)]
        assert second[0] == wan.second_site


@ALL
@pytest.mark.parametrize("seed", [0, 1])
def test_faults_come_at_the_same_times_and_last_as_long(name: str, seed: int) -> None:
    scenario = replace(load_scenario(name), seed=seed)
    conditions = simulated(scenario)
    events = []
    for freeze in conditions.freezes:
        if freeze.until_s is None:
            events.append(Event(freeze.from_s, freeze.rank, "kill"))
        else:
            events.append(Event(freeze.from_s, freeze.rank, "freeze"))
            events.append(Event(freeze.until_s, freeze.rank, "release"))
    for hang in conditions.hangs:
        events += [Event(hang.from_s, hang.rank, "hang"), Event(hang.until_s, hang.rank, "resume")]
    for dark in conditions.network.partitions:
        (host,) = dark.side
        events += [Event(dark.from_s, host, "link down"), Event(dark.until_s, host, "link up")]
    played = takewhile(lambda event: event.at_s < UNTIL_S, schedule(scenario))
    assert sorted(event for event in events if event.at_s < UNTIL_S) == list(played)


# ---- what happens ------------------------------------------------------------------------------------------
def admitted(scenario: HostScenario, packets: int, bytes_: int, every_ns: int) -> Counter[str]:
    """What the testbed's switch makes of packets that come to port 1 at even times."""
    queue = VirtualQueue(switch_ports(scenario)[1], scenario.seed)
    return Counter(queue.admit(bytes_ + 42, True, k * every_ns) for k in range(packets))


def carried(network: SimulatedNetwork, packets: int, bytes_: int, every_ns: int) -> Counter[str]:
    """The same in the simulated network, whose hosts have links without a limit."""
    spec = _native.NetworkSpec()
    replace(network, uplink_bytes_per_s=0.0, bursts=None, neighbours=None, wan=None, partitions=()).fill(spec)
    arrivals = rows(_native.carry(spec, 2, [(k * every_ns, 0, [1], bytes_) for k in range(packets)]))
    return Counter(
        "drop" if packet.at_ns < 0 else "trim" if packet.bytes < bytes_ else "pass" for packet in arrivals
    )


OWN_SWITCHES = {
    "bursty": "[switch.bursty_loss]\nenter_frac = 0.02\nleave_frac = 0.2\nloss_frac = 0.8\n",
    "trims-all": "[switch]\ntrim_above_bytes = 0\n",
    "shallow": "[port]\nqueue_bytes = 20_000\n",
}


@pytest.mark.parametrize("name", [*shipped_names(), *OWN_SWITCHES])
@pytest.mark.parametrize("load", [0.5, 1.5], ids=["idle", "overloaded"])
def test_both_switches_lose_trim_and_drop_as_many_packets(name: str, load: float) -> None:
    own = OWN_SWITCHES.get(name)
    scenario = load_scenario(name) if own is None else parse_scenario(own, name)
    bytes_, packets = 1430, 8000
    every_ns = round((bytes_ + 42) * 8e3 / scenario.port.rate_mbit_s / load)
    testbed = admitted(scenario, packets, bytes_, every_ns)
    simulation = carried(simulated(scenario).network, packets, bytes_, every_ns)
    for fate in ("pass", "trim", "drop"):
        assert simulation[fate] == pytest.approx(testbed[fate], abs=0.02 * packets), fate


@pytest.mark.parametrize("name", [name for name in shipped_names() if burst_order(load_scenario(name))])
def test_the_same_bursts_come_to_the_same_ports_at_the_same_times(name: str) -> None:
    scenario = replace(load_scenario(name), seed=3)
    order, bursts = burst_order(scenario), simulated(scenario).network.bursts
    assert order
    assert bursts
    of_testbed = burst_times(order["seed"], scenario.hosts, order["gap_min_s"], order["gap_mean_s"])
    coming = list(islice(of_testbed, 100))
    takes_ns = 1e9 * bursts.volume_bytes / RATE
    # A packet that comes a moment earlier passes, one that comes a moment later waits for all of the burst.
    sends = [(round(1e9 * at_s) + d_ns, 0, [port], 100) for at_s, port in coming for d_ns in (-1000, 1000)]
    spec = _native.NetworkSpec()
    SimulatedNetwork(bytes_per_s=RATE, uplink_bytes_per_s=0.0, delay_s=0.0, seed=3, bursts=bursts).fill(spec)
    arrivals = sorted(rows(_native.carry(spec, scenario.hosts, sends)), key=lambda packet: packet.number)
    waited_ns = [packet.at_ns - send[0] for packet, send in zip(arrivals, sends, strict=True)]
    assert max(waited_ns[::2]) < 0.01 * takes_ns
    assert min(waited_ns[1::2]) > 0.99 * takes_ns


# ---- every field -------------------------------------------------------------------------------------------
EVERYTHING = """
[port]
[switch]
bursty_loss = {enter_frac = 0.1, leave_frac = 0.5, loss_frac = 0.5}
[neighbours]
flow_bytes = 1000
gap_mean_s = 1
[[freezes]]
host = 0
at_s = 1
for_s = 1
[[hangs]]
host = 0
at_s = 1
for_s = 1
[[kills]]
host = 0
at_s = 1
[[link_downs]]
host = 0
at_s = 1
for_s = 1

[[slow_ports]]
host = 0
rate_frac = 0.5
"""
BACKGROUND = {
    "bursts": "[bursts]\nburst_bytes = 1000\ngap_min_s = 1\ngap_mean_s = 1\n",
    "tail": "[tail]\nratio = 2\n",
    "wan": "[wan]\n",
}
OTHERWISE = {
    "lengths": "leave-lengths",
    "trimmable_ports": (2000, 3000),
    "trimmable_dscp": 10,
    "trimmed_dscp": 40,
    "trim_above_bytes": 5000,
    "uplink_mbit_s": 50.0,
    "burst_bytes": 50_000,
    "host": 1,
    "every_s": 1.0,
    "rate_frac": 0.25,
}
"""Another value than the one above, where twice as much will not do."""
NO_MATTER = {"name", "description", "hosts"}
"""``hosts`` are the ranks, unless their number is given."""


def other(name: str, value: Any) -> Any:
    if name in OTHERWISE:
        return OTHERWISE[name]
    if isinstance(value, float) and value == 0:
        return 0.25
    return value + 1 if name == "seed" else 2 * value


def changes(scenario: Any, where: str = "") -> list[tuple[str, Any]]:
    """The scenario with another value in one place, for every place."""
    found = []
    for field in fields(scenario):
        value, place = getattr(scenario, field.name), f"{where}{field.name}"
        if place in NO_MATTER or (value in (None, ()) and field.name not in OTHERWISE):
            continue
        if isinstance(value, tuple) and value and is_dataclass(value[0]):
            inner = [(name, (part,)) for name, part in changes(value[0], f"{place}.")]
        elif is_dataclass(value):
            inner = changes(value, f"{place}.")
        else:
            inner = [(place, other(field.name, value))]
        found += [(name, replace(scenario, **{field.name: part})) for name, part in inner]
    return found


TESTBED_ONLY = {
    "port.burst_bytes",
    "switch.lengths",
    "switch.trimmable_ports",
    "switch.trimmable_dscp",
    "switch.trimmed_dscp",
}


@pytest.mark.parametrize("background", BACKGROUND)
def test_a_simulation_honours_every_field_or_refuses_it(background: str) -> None:
    scenario = parse_scenario(EVERYTHING + BACKGROUND[background], "everything")
    before = simulated(scenario)
    for place, changed in changes(scenario):
        if place in TESTBED_ONLY:
            with pytest.raises(ConfigError, match="has no meaning in a simulation: take it out"):
                simulated(changed)
        else:
            assert simulated(changed) != before, f"{place} changes nothing"


def test_a_simulated_testbed_has_the_buckets_of_its_links() -> None:
    def machine(text: str) -> Machine:
        found = conditions_of(parse_scenario(text, "own"), ranks=4, until_s=UNTIL_S, cores=2).network.machine
        assert found
        return found

    assert machine("[port]\nrate_mbit_s = 100\n").bucket_bytes == 25_000  # 2 ms, as in the testbed
    assert machine("[port]\nburst_bytes = 9000\n") == Machine(
        cores=2, packet_cost_s=PACKET_COST_S, bucket_bytes=9000
    )


def test_packets_are_shorter_only_where_a_switch_trims() -> None:
    def packets(scenario: HostScenario) -> int:
        options = Options(scenario=scenario, size_bytes=1 << 20, ops=2, codec="planes", planes=4)
        (row,) = run(options)
        return int(row.sides["tailcut"].notes["packets"])

    clean = load_scenario("clean")
    trimming = replace(clean, switch=replace(clean.switch, trim_above_bytes=8_000_000))
    assert packets(trimming) > 1.8 * packets(clean)
