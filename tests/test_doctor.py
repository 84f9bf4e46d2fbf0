"""tailcut doctor: every check on both sides of its threshold, then real ranks, hosts and faults."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tailcut import Config, FileStore, PeerError, Report
from tailcut.tools import doctor
from tailcut.tools.cli import main
from tailcut.tools.doctor import host, member, network, probes, render
from tailcut.tools.doctor.check import Check, Setting
from tailcut.tools.doctor.diagnosis import diagnose
from tailcut.tools.doctor.echo import MESSAGE, PING, Echo, Target
from tailcut.tools.doctor.findings import Findings, Op
from tailcut.tools.doctor.ping import PATIENCE_S, SHORTEST_PATIENCE_S, Ping, Pinger
from tailcut.tools.doctor.probes import HostFacts, Interface
from tests.netns import ADDRESSES, LINKS, drop_leaving, set_mtu
from tests.reports import links

LIMIT_S = 60  # only a hang takes longer

LO = Interface("lo", "127.0.0.1", 65_536)
ETH0 = Interface("eth0", "192.0.2.7", 1500)
ETH1 = Interface("eth1", "198.51.100.7", 9000)
GRANT_4_MIB = 8 << 20

FACTS = HostFacts(
    hostname="node7",
    hostname_address=ETH0.address,
    gloo_ifname="",
    interfaces=(LO, ETH0),
    chosen_by="route",
    chosen=ETH0,
    buffer_granted_bytes=GRANT_4_MIB,
    buffer_limit_bytes=4 << 20,
    segments=True,
    coalesces=True,
    multicast=True,
    packet_socket=True,
    loopback_rtt_s=2e-5,
)


@pytest.fixture(autouse=True)
def _no_ranks_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "TAILCUT_SOCKET_IFNAME",
    ):
        monkeypatch.delenv(name, raising=False)


def facts(**changes) -> HostFacts:
    return replace(FACTS, **changes)


def assigned(check: Check) -> dict[str, str]:
    return {setting.name: setting.value for setting in check.settings}


# ---- one host, as pure functions ---------------------------------------------------------------------------


def test_a_sound_host_has_nothing_to_remedy() -> None:
    checks = host.judge(FACTS, Config(), world_size=8)
    assert [check.status for check in checks] == ["ok"] * 8
    assert not any(check.remedy or check.settings for check in checks)


@pytest.mark.parametrize(
    ("config", "route_address", "expected"),
    [
        ({}, ETH1.address, (ETH1, "route")),
        ({}, LO.address, (LO, "route")),
        ({}, None, (ETH0, "order")),
        ({"socket_ifname": "eth1"}, ETH0.address, (ETH1, "GLOO_SOCKET_IFNAME")),
        ({"socket_ifname": "eth7"}, ETH0.address, (None, "GLOO_SOCKET_IFNAME")),
        ({"address": LO.address, "socket_ifname": "eth1"}, ETH0.address, (LO, "TAILCUT_ADDRESS")),
        ({"address": "203.0.113.1"}, ETH0.address, (None, "TAILCUT_ADDRESS")),
    ],
)
def test_the_interface_is_chosen_as_a_group_chooses_it(config, route_address, expected) -> None:
    assert probes.choose((LO, ETH0, ETH1), Config(**config), route_address) == expected


def test_an_interface_that_is_not_there_fails_and_names_the_variable() -> None:
    check = host.interface(
        facts(chosen=None, chosen_by="TAILCUT_SOCKET_IFNAME"), Config(socket_ifname="eth7")
    )
    assert check.status == "fail"
    assert "TAILCUT_SOCKET_IFNAME=eth7" in check.found
    assert "eth0 192.0.2.7 (MTU 1500)" in check.found


@pytest.mark.parametrize(("found", "chosen"), [((LO,), None), ((LO,), LO), ((), None)])
def test_a_host_without_a_network_is_enough_for_one_host(found, chosen) -> None:
    check = host.interface(facts(interfaces=found, chosen=chosen), Config())
    assert check.status == "warn"
    assert "no network but" in check.found


def test_several_networks_suggest_naming_one_unless_one_is_named() -> None:
    several = facts(interfaces=(LO, ETH0, ETH1))
    assert assigned(host.interface(several, Config())) == {"TAILCUT_SOCKET_IFNAME": "eth0"}
    assert assigned(host.interface(several, Config(address=ETH0.address))) == {}
    assert assigned(host.interface(FACTS, Config())) == {}


def test_packets_follow_the_mtu_and_larger_ones_fail() -> None:
    assert "datagrams of at most 1472 bytes" in host.packets(FACTS, Config(), 2).found
    assert host.packets(FACTS, Config(packet_bytes=1408), 2).status == "ok"
    check = host.packets(FACTS, Config(packet_bytes=1409), 2)
    assert check.status == "fail"
    assert "packet_bytes=1409 exceeds the 1408 bytes" in check.found
    assert host.packets(facts(chosen=None), Config(), 2).status == "warn"


@pytest.mark.parametrize("world_size", [2, 8, 24, 100])
def test_the_buffer_that_is_suggested_is_just_enough(world_size: int) -> None:
    needed = host.needed_buffer_bytes(world_size)
    enough = facts(buffer_granted_bytes=2 * needed)
    assert host.receive_buffer(enough, Config(), world_size).status == "ok"
    less = facts(buffer_granted_bytes=2 * (needed - 65_536))
    assert host.receive_buffer(less, Config(), world_size).status == "warn"


@pytest.mark.parametrize(("granted", "status"), [(360_229, "ok"), (360_228, "warn")])
def test_four_datagrams_of_61504_bytes_and_their_overhead_are_enough(granted: int, status: str) -> None:
    check = host.receive_buffer(facts(buffer_granted_bytes=granted), Config(), 2)
    assert check.status == status
    assert "4.0 large datagrams from a peer" in check.found


def test_a_small_buffer_is_mended_by_asking_for_more_or_by_allowing_more() -> None:
    needed = str(host.needed_buffer_bytes(8))
    by_kernel = facts(buffer_granted_bytes=2 * 212_992, buffer_limit_bytes=212_992)
    check = host.receive_buffer(by_kernel, Config(), 8)
    assert assigned(check) == {"net.core.rmem_max": needed}
    assert f"sudo sysctl -w net.core.rmem_max={needed}" in check.remedy

    by_us = facts(buffer_granted_bytes=212_992, buffer_limit_bytes=4 << 20)
    check = host.receive_buffer(by_us, Config(receive_buffer_bytes=0), 8)
    assert assigned(check) == {"TAILCUT_RECEIVE_BUFFER_BYTES": needed}
    assert f"export TAILCUT_RECEIVE_BUFFER_BYTES={needed}" in check.remedy


@pytest.mark.parametrize(
    ("changes", "config", "status", "words"),
    [
        ({}, Config(), "ok", "UDP_SEGMENT"),
        ({}, Config(offload=False), "warn", "TAILCUT_OFFLOAD"),
        ({"segments": False}, Config(), "warn", "refuses UDP_SEGMENT:"),
        ({"coalesces": False}, Config(), "warn", "refuses UDP_GRO:"),
    ],
)
def test_offload(changes, config, status, words) -> None:
    check = host.offload(facts(**changes), config)
    assert check.status == status
    assert words in check.found


@pytest.mark.parametrize(
    ("asked", "permitted", "status", "words"),
    [
        (False, True, "ok", "others need TAILCUT_RECEIVE_UNCORRECTED=1"),
        (False, False, "ok", "TAILCUT_RECEIVE_UNCORRECTED=1 and CAP_NET_RAW"),
        (True, True, "ok", "pass by the firewall"),
        (True, False, "fail", "CAP_NET_RAW, which is not granted"),
    ],
)
def test_packets_trimmed_without_correction_are_received_if_asked_for_and_permitted(
    asked, permitted, status, words
) -> None:
    check = host.trimmed(facts(packet_socket=permitted), Config(receive_uncorrected=asked))
    assert check.status == status
    assert words in check.found


def test_multicast_that_does_not_come_back_is_only_a_warning() -> None:
    assert host.multicast(FACTS).status == "ok"
    check = host.multicast(facts(multicast=False))
    assert check.status == "warn"
    assert "ip link set eth0 multicast on" in check.remedy


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", None])
def test_a_hostname_on_loopback_harms_gloo_unless_its_interface_is_named(address) -> None:
    debian = facts(hostname_address=address)
    check = host.hostname(debian)
    assert check.status == "warn"
    assert assigned(check) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert assigned(host.hostname(replace(debian, chosen=None))) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert host.hostname(replace(debian, gloo_ifname="eth0")).status == "ok"
    assert host.hostname(replace(debian, interfaces=(LO,), chosen=LO)).status == "ok"


@pytest.mark.parametrize(("rtt_s", "status"), [(1e-3, "ok"), (1.001e-3, "warn"), (None, "fail")])
def test_loopback(rtt_s, status) -> None:
    assert host.loopback(facts(loopback_rtt_s=rtt_s)).status == status


def test_this_kernel_is_asked() -> None:
    found = probes.ask(Config(receive_buffer_bytes=65_536))
    assert LO in found.interfaces
    assert (found.buffer_granted_bytes, found.segments, found.coalesces) == (131_072, True, True)
    assert found.loopback_rtt_s is not None
    assert found.loopback_rtt_s > 0
    assert probes._multicast_returns("127.0.0.1")
    assert not probes._multicast_returns("203.0.113.1")
    assert not probes._accepts(9999, 1)


# ---- pinging -----------------------------------------------------------------------------------------------


def test_a_pinger_counts_what_is_lost_and_when_the_rest_came_back() -> None:
    pinger, now = Pinger(count=10, in_flight=4), 0.0
    while not pinger.finished(now):
        if pinger.due(now):
            number = pinger.send(now)
            if number not in (2, 5):
                pinger.answered(number, now + 0.001 * (1 + number))
                pinger.answered(number, now + 0.5)  # a duplicate
        now += 0.01
    assert pinger.result("192.0.2.8", 1328) == Ping(
        "192.0.2.8",
        1328,
        sent=10,
        answered=8,
        rtt_min_s=pytest.approx(0.001),
        rtt_median_s=pytest.approx(0.006),
    )


def test_a_pinger_keeps_few_in_flight_and_gives_lost_ones_up() -> None:
    pinger = Pinger(count=100, in_flight=4)
    sent = 0
    while pinger.due(0.0):
        sent += 1
        pinger.send(0.0)
    assert sent == 4
    assert not pinger.due(PATIENCE_S - 0.001)
    assert pinger.due(PATIENCE_S)
    pinger.answered(99, PATIENCE_S)  # never sent
    assert pinger.result("", 0) == Ping("", 0, 4, 0, None, None)


def test_a_pinger_waits_less_for_a_peer_that_is_near_whatever_one_answer_took() -> None:
    pinger = Pinger(count=100, in_flight=1)
    for rtt_s in (0.9, 0.001, 0.001):
        pinger.answered(pinger.send(0.0), rtt_s)
    pinger.send(0.0)
    assert not pinger.due(SHORTEST_PATIENCE_S - 0.001)
    assert pinger.due(SHORTEST_PATIENCE_S)


def test_an_echo_socket_ignores_strangers_and_other_runs() -> None:
    with Echo("127.0.0.1", 0, 0, 2, run=7) as echo, socket.socket(type=socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(LIMIT_S)
        stranger.bind(("127.0.0.1", 0))
        wrong = [b"", b"tailcutP", MESSAGE.pack(PING, 8, 1, 0, 1), MESSAGE.pack(PING, 7, 1, 1, 2)]
        wrong += [MESSAGE.pack(PING, 7, 2, 0, 3), MESSAGE.pack(b"tailcutX", 7, 1, 0, 4)]
        for datagram in [*wrong, MESSAGE.pack(PING, 7, 1, 0, 5), MESSAGE.pack(PING, 7, 1, 0, 5)]:
            stranger.sendto(datagram, ("127.0.0.1", echo.port))
        echo.answer_until(lambda: echo.heard == [0, 1], LIMIT_S)
        assert echo.heard == [0, 1]
        assert MESSAGE.unpack(stranger.recv(100))[2:] == (0, 1, 5)


def test_pings_to_a_dead_port_end_and_are_all_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailcut.tools.doctor.echo.limit_s", lambda world_size: 0.1)
    with Echo("127.0.0.1", 0, 0, 2, run=7) as echo:
        (ping,) = echo.ping({1: Target("127.0.0.1", 9, 1328)}).values()
    assert (ping.sent, ping.answered, ping.rtt_median_s) == (4, 0, None)


# ---- what lies between ranks, as pure functions ------------------------------------------------------------


def pinged(sent=200, answered=200, rtt_s: float | None = 1e-4) -> Ping:
    return Ping("192.0.2.8", 1328, sent, answered, rtt_s, rtt_s)


def two_ranks(there: Ping, back: Ping, heard=(200, 200), ops: tuple[Op, ...] = ()) -> dict[int, Findings]:
    """Rank 0's pings and rank 1's; what rank 1 heard of rank 0, and rank 0 of rank 1."""
    return {
        0: Findings(0, "a", "host-a", pings={1: there}, heard=[0, heard[1]], ops=list(ops)),
        1: Findings(1, "b", "host-b", pings={0: back}, heard=[heard[0], 0], ops=list(ops)),
    }


@pytest.mark.parametrize(("heard", "status"), [(200, "ok"), (199, "warn"), (190, "warn"), (189, "fail")])
def test_loss_is_of_one_direction(heard: int, status: str) -> None:
    ranks = two_ranks(pinged(answered=heard), pinged(), heard=(heard, 200))
    assert network.lost_frac(ranks, 0, 1) == pytest.approx(1 - heard / 200)
    assert network.lost_frac(ranks, 1, 0) == 0
    assert network.lost_frac(ranks, 0, 0) is None
    assert network.loss(ranks).status == status


def test_an_answer_that_is_lost_is_no_loss_of_the_way_there() -> None:
    ranks = two_ranks(pinged(answered=150), pinged(sent=200, answered=150), heard=(200, 150))
    assert network.lost_frac(ranks, 0, 1) == 0
    assert network.lost_frac(ranks, 1, 0) == 0.25
    assert "1 of 2 pairs" in network.loss(ranks).found
    assert "1 to 0 25.0%" in network.loss(ranks).found


def test_without_the_receivers_count_what_is_unanswered_is_lost() -> None:
    ranks = two_ranks(pinged(sent=8, answered=2), pinged())
    del ranks[1]
    assert network.lost_frac(ranks, 0, 1) == 0.75
    assert network.loss(ranks).found == "not measured"  # it has ended, which is not the network's loss
    assert network.reported(ranks, 2).status == "fail"
    assert "ranks [1]" in network.reported(ranks, 2).found


@pytest.mark.parametrize(
    ("slow_s", "status"), [(0.9e-3, "ok"), (1.1e-3, "warn"), (0.011, "warn"), (None, "ok")]
)
def test_a_pair_is_slow_against_the_others(slow_s, status) -> None:
    findings = Findings(0, "a", "host-a", pings={peer: pinged(rtt_s=1e-5) for peer in range(1, 6)})
    findings.pings[6] = pinged(rtt_s=slow_s)
    assert network.rtt({0: findings}).status == status


def test_a_rank_that_answers_everybody_late_is_named() -> None:
    def of(rank: int) -> Findings:
        pings = {peer: pinged(rtt_s=0.02 if 3 in (rank, peer) else 1e-4) for peer in range(6) if peer != rank}
        return Findings(rank, "a", "host-a", pings=pings)

    check = network.rtt({rank: of(rank) for rank in range(6)})
    assert check.status == "warn"
    assert "rank 3 answers late to everybody" in check.found


@pytest.mark.parametrize(
    ("way", "words"), [(None, "none is"), (0, "from rank 1 takes 9.0 ms"), (1, "to rank 1 takes 9.0 ms")]
)
def test_a_rank_whose_port_is_slow_is_named(way: int | None, words: str) -> None:
    def of(rank: int) -> Findings:
        pairs = [(source, rank) for source in range(4)]
        took_s = [0.009 if way is not None and pair[way] == 1 else 0.002 for pair in pairs]
        return Findings(rank, "a", "host-a", ops=[Op(0.01, True, 0.0, list(took_s))])

    (check,) = network.ports({rank: of(rank) for rank in range(4)})
    assert check.status == ("ok" if way is None else "warn")
    assert words in check.found


def test_far_hosts_are_not_slow_pairs() -> None:
    assert network.rtt(two_ranks(pinged(rtt_s=0.08), pinged(rtt_s=0.08))).status == "ok"
    assert network.rtt(two_ranks(pinged(rtt_s=None), pinged(rtt_s=None))).status == "fail"


def test_ops_are_as_the_slowest_rank_saw_them() -> None:
    ranks = two_ranks(pinged(), pinged())
    ranks[0].ops = [Op(0.1, True, 0.0), Op(0.4, True, 0.0), Op(9.0, True, 0.0)]
    ranks[1].ops = [Op(0.2, True, 0.0), Op(0.3, False, 0.5)]
    assert network.slowest_ops(ranks, 2) == [Op(0.2, True, 0.0), Op(0.4, False, 0.25)]
    assert network.slowest_ops(ranks, 3) == []


@pytest.mark.parametrize(
    ("op", "status"),
    [
        (Op(0.1, True, 0.0), "ok"),
        (Op(5.0, False, 0.0), "warn"),
        (Op(5.0, False, 0.05), "warn"),
        (Op(5.0, False, 0.051), "fail"),
    ],
)
def test_allreduce(op: Op, status: str) -> None:
    check = network.allreduce([op] * 10, 25 << 20)
    assert check.status == status
    assert "10 ops of 25 MiB" in check.found


def test_the_deadline_suggested_is_three_times_the_slowest_complete_op() -> None:
    ops = [Op(0.02, True, 0.0)] * 8 + [Op(0.0304, True, 0.0), Op(5.0, False, 0.1)]
    assert assigned(network.deadline(ops, 4 << 20, 10.0)) == {"TAILCUT_DEADLINE_S": "0.092"}
    assert assigned(network.deadline([Op(1e-4, True, 0.0)], 64, 10.0)) == {"TAILCUT_DEADLINE_S": "0.01"}
    assert network.deadline(ops, 4 << 20, 0.031).status == "ok"
    assert network.deadline(ops, 4 << 20, 0.030).status == "warn"


def test_no_deadline_is_suggested_from_ops_that_were_cut() -> None:
    half = [Op(0.02, True, 0.0), Op(5.0, False, 0.1)]
    assert assigned(network.deadline(half, 4 << 20, 10.0)) == {"TAILCUT_DEADLINE_S": "0.06"}
    check = network.deadline([*half, Op(5.0, False, 0.1)], 4 << 20, 10.0)
    assert (check.status, check.settings) == ("warn", ())
    assert "only 1 of 3 ops completed" in check.found


@pytest.mark.parametrize(
    ("bytes_failed", "suggested"), [(8768, "1280"), (61504, "8704"), (1344, "1024"), (320, "256")]
)
def test_swallowed_packets_suggest_a_smaller_size(bytes_failed: int, suggested: str) -> None:
    text = f"Rank 1 at 192.0.2.8 (UDP port 5) answers small packets but none of {bytes_failed} bytes: set"
    assert assigned(member._failed("reachability", text)) == {"TAILCUT_PACKET_BYTES": suggested}
    assert member._failed("reachability", "Rank 1 does not answer").settings == ()


# ---- putting it together -----------------------------------------------------------------------------------


def test_findings_survive_their_journey() -> None:
    setting = Setting("TAILCUT_DEADLINE_S", "0.1", "why")
    findings = Findings(
        1,
        "b",
        "host-b",
        [Check("c", "warn", "f", "r", (setting,))],
        {0: pinged()},
        [3, 0],
        [Op(1.0, True, 0.0)],
    )
    assert Findings.from_json(json.loads(json.dumps(findings.as_json()))) == findings


def test_ranks_of_one_host_show_its_worst_finding_once() -> None:
    statuses = [("a", "ok"), ("a", "warn"), ("a", "warn"), ("b", "ok")]
    ranks = {
        rank: Findings(rank, "node", identity, [Check("loopback", status, f"of rank {rank}")])
        for rank, (identity, status) in enumerate(statuses)
    }
    shown = diagnose(ranks, 4, doctor.Options(Config())).checks
    assert [(p.where, p.check.found) for p in shown if p.check.name == "loopback"] == [
        ("node (rank 1)", "of rank 1"),
        ("node (rank 3)", "of rank 3"),
    ]


def test_hosts_that_are_well_share_a_line_and_the_others_do_not() -> None:
    ranks = {
        rank: Findings(rank, f"node{rank}", f"host-{rank}", [Check("loopback", status, f"of rank {rank}")])
        for rank, status in enumerate(["ok", "warn", "ok"])
    }
    diagnosis = diagnose(ranks, 3, doctor.Options(Config()))
    lines = [line.split() for line in render.as_text(diagnosis).splitlines() if "loopback" in line]
    assert lines == [
        ["warn", "loopback", "node1", "of", "rank", "1"],
        ["ok", "loopback", "2", "hosts", "e.g.", "node0:", "of", "rank", "0"],
    ]
    assert len([c for c in render.as_json(diagnosis)["checks"] if c["name"] == "loopback"]) == 3


def test_the_text_has_matrices_settings_and_a_verdict() -> None:
    ranks = two_ranks(pinged(answered=150, rtt_s=2e-4), pinged(0, 0, None), (180, 0), (Op(0.03, True, 0.0),))
    text = render.as_text(diagnose(ranks, 2, doctor.Options(Config(deadline_s=10))))
    assert "0  a" in text
    assert "1  b 192.0.2.8" in text
    assert "0.200 (0.200)" in text
    assert "silent" in text
    assert "10.0" in text
    assert "FAIL  loss" in text
    assert "  export TAILCUT_DEADLINE_S=0.09\n" in text
    assert text.endswith("4 ok, 0 to look at, 1 failed")


# ---- the command -------------------------------------------------------------------------------------------


def test_alone_it_examines_this_host(capsys) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in (
        "interface",
        "packets",
        "receive buffer",
        "offload",
        "multicast",
        "trimmed packets",
        "hostname",
        "loopback",
    ):
        assert f" {name} " in text
    assert "from each of 7 peers" in " ".join(text.split())
    assert "RTT" not in text
    assert main(["doctor", "--world-size", "100"]) == 0
    assert "TAILCUT_RECEIVE_BUFFER_BYTES=" in capsys.readouterr().out


def test_a_failed_check_exits_with_1(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TAILCUT_SOCKET_IFNAME", "absent0")
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["exit_status"] == 1
    assert [c["name"] for c in document["checks"] if c["status"] == "fail"] == ["interface"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rank", "0"], "--rank needs --store"),
        (["--store", "/tmp"], "--store needs --rank and --world-size"),
        (["--store", "/tmp", "--rank", "2", "--world-size", "2"], "rank 2 of 2"),
        (["--local", "1"], "--local 1 must be between 2 and 256"),
        (["--world-size", "0"], "--world-size 0 must be"),
        (["--bucket", "6"], "bucket=6 must be a multiple of 4"),
        (["--wait", "0"], "rendezvous_s=0"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, words, capsys) -> None:
    assert main(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_environment_of_torchrun_that_is_no_number_exits_with_2(monkeypatch, capsys) -> None:
    for name, value in (("RANK", "x"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 2
    assert "RANK and WORLD_SIZE in the environment" in capsys.readouterr().err


KEYS = {
    "tailcut", "exit_status", "world_size", "ranks", "checks", "packet_bytes", "sent", "answered",
    "rtt_min_s", "rtt_median_s", "lost_frac", "allreduce", "settings",
}  # fmt: skip


def test_local_ranks_measure_each_other(capsys) -> None:
    assert main(["doctor", "--local", "2", "--bucket", "64K", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == KEYS
    assert [rank["address"] for rank in document["ranks"]] == ["127.0.0.1"] * 2
    assert document["sent"] == [[None, 200], [200, None]]
    assert document["rtt_min_s"][0][1] <= document["rtt_median_s"][0][1]
    assert document["packet_bytes"][1][0] == 61_504
    assert document["allreduce"]["bucket_bytes"] == 65_536
    assert 1 <= len(document["allreduce"]["elapsed_s"]) <= 10
    assert {"name", "status", "where", "rank", "found", "remedy"} == set(document["checks"][0])
    names = [check["name"] for check in document["checks"]]
    assert names[-7:] == ["reachability", "multicast peers", "ranks", "rtt", "loss", "allreduce", "deadline"]
    assert "TAILCUT_DEADLINE_S" in [setting["name"] for setting in document["settings"]]


# ---- ranks in threads: what goes wrong on the way ----------------------------------------------------------


class Run:
    """Ranks of one run; what rank 0 showed, what the others complained of, how each ended."""

    def __init__(self) -> None:
        self.shown: list[doctor.Diagnosis] = []
        self.complaints: list[str] = []
        self.statuses: dict[int, int] = {}

    def member(self, rank: int, directory: Path, world_size: int = 2, **config) -> None:
        options = doctor.Options(Config(**config), bucket_bytes=4096)
        self.statuses[rank] = doctor.run_member(
            rank, world_size, FileStore(directory), options, self.shown.append, self.complaints.append
        )

    def failed(self) -> dict[str, str]:
        (diagnosis,) = self.shown
        return {p.check.name: p.check.found for p in diagnosis.checks if p.check.status == "fail"}


def in_thread(call, *arguments, **keywords) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments, kwargs=keywords)
    thread.start()
    return thread


def test_a_missing_rank_is_a_failed_check_and_an_earlier_run_is_not_mistaken_for_it(tmp_path: Path) -> None:
    first = Run()
    other = in_thread(first.member, 1, tmp_path)
    first.member(0, tmp_path)
    other.join()
    assert (first.statuses, first.complaints) == ({0: 0, 1: 0}, [])

    second = Run()
    second.member(0, tmp_path, rendezvous_s=0.05)
    assert second.statuses == {0: 1}
    assert list(second.shown[0].ranks) == [0]
    assert "Rank 1 does not answer at 127.0.0.1" in second.failed()["reachability"]
    assert "ranks [1] did not report" in second.failed()["ranks"]


def test_a_rank_without_rank_0_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "COLLECT_S", 0.05)
    run = Run()
    run.member(1, tmp_path, rendezvous_s=0.05)
    assert run.statuses == {1: 1}
    assert "Ranks [0] did not come" in run.complaints[0]
    assert "rank 0 did not say how the run went" in run.complaints[1]


def test_a_rank_that_failed_before_rank_0_began_is_heard(tmp_path: Path) -> None:
    earlier = Run()
    other = in_thread(earlier.member, 1, tmp_path)
    earlier.member(0, tmp_path)
    other.join()
    run, complained = Run(), threading.Event()
    run.complaints = Signalling(complained)
    other = in_thread(run.member, 1, tmp_path, address="203.0.113.1")
    assert complained.wait(LIMIT_S)
    run.member(0, tmp_path, rendezvous_s=1)
    other.join()
    assert run.statuses == {0: 1, 1: 1}
    assert list(run.shown[0].ranks) == [0, 1]
    assert "TAILCUT_ADDRESS=203.0.113.1 is not on this host" in run.failed()["interface"]


class Signalling(list):
    """Tells when the first entry is there."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def append(self, entry) -> None:
        super().append(entry)
        self._event.set()


def test_a_rank_that_ends_after_the_meeting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "SKEW_S", 0.1)
    monkeypatch.setattr(doctor, "COLLECT_S", 0.1)
    leaver = in_thread(member._meet, 1, 2, FileStore(tmp_path), Config())
    run = Run()
    run.member(0, tmp_path)
    leaver.join()
    assert run.statuses == {0: 1}
    assert "ranks [1] met rank 0 and then ended" in run.failed()["ping"]


class SilentPeer:
    """A group whose rank 1 is frozen."""

    def __init__(self, *_, **__) -> None:
        self.report = Report(7, "partial", 1024, 5.0, links=links(gather_lost=(0.0, 1.0)), lost_frac=0.5)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def allreduce(self, bucket):
        return self

    def wait(self) -> Report:
        return self.report


def test_a_peer_that_is_silent_in_an_op_ends_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "Group", SilentPeer)
    findings = Findings(0, "a", "host-a")
    with pytest.raises(PeerError, match=r"ranks \[1\] sent nothing in op 7"):
        member._average(findings, 2, FileStore("/tmp"), doctor.Options(Config()))
    assert findings.ops == [Op(5.0, False, 0.5, [0.0, 0.0])]


# ---- ranks in processes ------------------------------------------------------------------------------------

RANK = ("-m", "tailcut.tools.cli", "doctor", "--json", "--bucket", "64K")


class Ended:
    """Two ranks that have ended: their statuses, rank 0's document, and what they complained of."""

    def __init__(self, commands: list[list[str]], **environment: str) -> None:
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, command in enumerate(commands)
        ]
        ends = [process.communicate(timeout=LIMIT_S) for process in processes]
        self.statuses = [process.returncode for process in processes]
        self.complaints = [err for _, err in ends]
        assert ends[1][0] == ""
        self.document = json.loads(ends[0][0])

    def check(self, name: str) -> list[dict]:
        return [check for check in self.document["checks"] if check["name"] == name]

    def settings(self) -> dict[str, str]:
        return {setting["name"]: setting["value"] for setting in self.document["settings"]}


def test_ranks_of_torchrun_meet_in_its_store() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = Ended([[sys.executable, *RANK]] * 2, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert (run.statuses, run.complaints) == ([0, 0], ["", ""])
    assert run.document["lost_frac"] == [[None, 0.0], [0.0, None]]


def test_a_torch_store_that_is_gone_is_a_peer_error() -> None:
    from tailcut.pytorch.store import TorchStore

    class Gone:
        def check(self, *_) -> bool:
            raise RuntimeError("Connection reset")

        set = get = check

    store = TorchStore(Gone(), "192.0.2.8:29500")
    for question in (lambda: store.set("k", b""), lambda: store.get("k"), lambda: store.check(["k"])):
        with pytest.raises(PeerError, match=r"the store at 192\.0\.2\.8:29500 does not answer"):
            question()


def on_two_hosts(hosts: tuple[str, str], directory: Path, wait_s: float = 30, **environment: str) -> Ended:
    places = [f"--rank {rank} --world-size 2 --wait {wait_s}" for rank in range(2)]
    commands = [
        [*f"ip netns exec {name} {sys.executable}".split(), *RANK, "--store", str(directory), *place.split()]
        for name, place in zip(hosts, places, strict=True)
    ]
    return Ended(commands, **environment)


def test_a_path_that_swallows_full_packets_is_told_and_its_remedy_works(
    tmp_path: Path, two_hosts: tuple[str, str]
) -> None:
    set_mtu(two_hosts[0], LINKS[0], 9000)
    run = on_two_hosts(two_hosts, tmp_path, wait_s=3)
    assert run.statuses == [1, 1]
    near, far = run.check("reachability")
    assert "Rank 1 at 10.111.0.2" in near["found"]
    assert "answers small packets but none of 8972 bytes" in near["found"]
    assert "ranks [0] did not hear all of their peers" in far["found"]
    assert run.complaints[1] == f"tailcut: rank 1: {far['found']}\n"
    assert run.settings()["TAILCUT_PACKET_BYTES"] == "1280"

    run = on_two_hosts(two_hosts, tmp_path, TAILCUT_PACKET_BYTES="1280")
    assert (run.statuses, run.complaints) == ([0, 0], ["", ""])
    assert run.document["packet_bytes"] == [[None, 1344], [1344, None]]
    assert [rank["address"] for rank in run.document["ranks"]] == list(ADDRESSES)


def test_a_firewall_that_drops_udp_is_a_failed_check_on_both_sides(
    tmp_path: Path, two_hosts: tuple[str, str]
) -> None:
    drop_leaving(two_hosts[1], LINKS[1], "u8 17 0xff at 9")
    run = on_two_hosts(two_hosts, tmp_path, wait_s=3)
    assert run.statuses == [1, 1]
    near, far = run.check("reachability")
    assert "Rank 1 does not answer at 10.111.0.2" in near["found"]
    assert "Rank 0 does not answer at 10.111.0.1" in far["found"]
    assert run.document["sent"] == [[None, None], [None, None]]
    assert run.document["allreduce"]["elapsed_s"] == []


def test_a_lossy_direction_is_measured_exactly(tmp_path: Path, two_hosts: tuple[str, str]) -> None:
    """Every eighth ping of rank 1 is dropped; ops and the other direction are left alone."""
    after_headers = 20 + 8
    kind = f"u32 0x{PING[4:].hex()} 0xffffffff at {after_headers + 4}"
    number = f"u32 0 0x7 at {after_headers + MESSAGE.size - 4}"
    drop_leaving(two_hosts[1], LINKS[1], kind, number)
    run = on_two_hosts(two_hosts, tmp_path)
    assert run.statuses == [1, 1]
    assert run.document["lost_frac"] == [[None, 0.0], [0.125, None]]
    assert run.document["answered"] == [[None, 200], [175, None]]
    (loss,) = run.check("loss")
    assert (loss["status"], run.check("allreduce")[0]["status"]) == ("fail", "ok")
    assert "1 of 2 pairs lose datagrams at a gentle pace: 1 to 0 12.5%" in loss["found"]
