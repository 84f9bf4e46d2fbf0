"""Datagrams that claim to be from a rank and come from elsewhere: dropped before the protocol sees them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailcut import Group, _native
from tests.groups import allreduce, open_groups, vectors
from tests.netns import LINKS
from tests.reports import abstained

LIMIT_S = 60  # only a hang takes longer
LOOPBACK = "127.0.0.1"
GOODBYE = 3


def goodbye(tag: int, source: int) -> bytes:
    """What a rank says that leaves: its peers would count on it no more."""
    header = _native.Header()
    header.type, header.group_tag, header.source, header.stamp_us = GOODBYE, tag, source, 1
    return header.pack()


def port_of(group: Group) -> int:
    return group._ops.lanes[0].port


def await_rejected(group: Group, count: int) -> None:
    give_up = time.monotonic() + LIMIT_S
    while sum(group.stats().rejected.values()) < count and time.monotonic() < give_up:
        time.sleep(0.001)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_goodbye_in_the_name_of_a_rank_is_believed_only_from_its_address(tmp_path: Path, rows: int) -> None:
    with open_groups(tmp_path, 4, rows=rows) as groups, socket.socket(type=socket.SOCK_DGRAM) as stranger:
        stranger.bind((LOOPBACK, 0))
        to_first = (LOOPBACK, port_of(groups[0]))
        member = socket.fromfd(groups[3]._ops.lanes[0].descriptor, socket.AF_INET, socket.SOCK_DGRAM)
        for tag in _native.grid_tags(groups[0].tag, 0, 4, rows):
            stranger.sendto(goodbye(tag, 1), to_first)  # another port
            member.sendto(goodbye(tag, 1), to_first)  # another member
        member.close()
        forged = 2 * min(2, rows)
        await_rejected(groups[0], forged)
        for _ in range(2):
            reports = allreduce(groups, vectors(4, 5000))
            assert [(r.status, abstained(r), r.missing_from) for r in reports] == [("complete", (), ())] * 4
        rejected = groups[0].stats().rejected
        assert rejected.pop("address") == forged
        assert not any(rejected.values())


def test_a_packet_in_the_name_of_no_rank_is_refused_as_before(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2) as groups, socket.socket(type=socket.SOCK_DGRAM) as stranger:
        stranger.bind((LOOPBACK, 0))
        for datagram in (goodbye(groups[0].tag, 7), goodbye(groups[0].tag ^ 1, 1), b"", b"\x7c\x02"):
            stranger.sendto(datagram, (LOOPBACK, port_of(groups[0])))
        await_rejected(groups[0], 4)
        rejected = groups[0].stats().rejected
        assert (rejected["source"], rejected["group"], rejected["short"]) == (1, 1, 2)
        assert rejected["address"] == 0


RANK = """
import sys
import numpy as np
from tailcut import Config, FileStore, Group

rank = int(sys.argv[1])
with Group(rank, 2, FileStore(sys.argv[2]), Config(codec="raw", deadline_s=60)) as group:
    array = np.full(50_000, rank, np.float32)
    report = group.allreduce(array).wait()
    print(report.status, array[0], array[-1], sum(group.stats().rejected.values()))
"""


def test_a_rank_may_send_from_another_address_than_it_is_reached_at(
    tmp_path: Path, two_hosts: tuple[str, str]
) -> None:
    """The first host is met at 10.111.0.1, and routes what it sends by a second address."""
    near = ("ip", "-n", two_hosts[0])
    subprocess.run([*near, *f"addr add 10.111.0.9/32 dev {LINKS[0]}".split()], check=True)
    subprocess.run([*near, *f"route replace 10.111.0.0/24 dev {LINKS[0]} src 10.111.0.9".split()], check=True)
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(two_hosts)
    ]
    try:
        assert [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks] == ["complete 0.5 0.5 0\n"] * 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
