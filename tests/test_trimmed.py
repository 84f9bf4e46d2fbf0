"""Packets that a switch has cut without correcting their lengths: only a packet socket sees those."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.netns import ADDRESSES, LINKS

RECEIVER = """
import ipaddress, json, sys, time
from tailcut import _native
from tailcut.policy.deadline import fixed_bounds

permitted = sys.argv[1] == "permitted"
lane = _native.UdpLane(0, 0, True)
if permitted:
    lane.receive_trimmed()
lane.start(
    rank=0, ranks=2, rows=1, seed=0, group_tag=7, window_ops=4, codec=_native.CODEC_PLANES, resend=True,
    carry=False, pool_bytes=1 << 20, window_bytes=1 << 20, terms=_native.Terms(fixed_bounds(1.0), 16),
    peers=[_native.PeerSettings(1 << 20, 1 << 20, 1424, 166, False)] * 2, addresses=[(0x7F000001, 9)] * 2,
    sources=[[], [(int(ipaddress.IPv4Address(sys.argv[2])), 5555)]],
)
print(lane.port, flush=True)
give_up = time.monotonic() + 20
while lane.stats().protocol.rejected["group"] < 1 and time.monotonic() < give_up:
    time.sleep(0.001)  # the last one has come
stats = lane.stats()
print(json.dumps({"uncorrected": stats.uncorrected_packets, **stats.protocol.rejected}))
lane.close(0)
lane.join(10**9)
"""

SENDER = """
import socket, struct, sys

link, mac, port = sys.argv[1], bytes.fromhex(sys.argv[2].replace(":", "")), int(sys.argv[3])
near, far = (socket.inet_aton(address) for address in sys.argv[4:6])
out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
out.bind((link, 0))

def send(payload, cut_bytes=0, port=port, fragment=0, source_port=5555):
    udp = struct.pack("!HHHH", source_port, port, 8 + len(payload), 0) + payload
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 1, fragment, 64, 17, 0, near, far)
    total = sum(struct.unpack("!10H", ip))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    ip = ip[:10] + struct.pack("!H", checksum) + ip[12:]
    frame = mac + bytes(6) + b"\\x08\\x00" + ip + udp
    out.send(frame[: len(frame) - cut_bytes])

other_version = b"\\x7c\\x09" + bytes(300)
send(other_version, cut_bytes=100, port=port + 1)   # to somebody else
send(other_version, cut_bytes=100, fragment=0x2000) # a fragment is not whole for another reason
send(other_version, cut_bytes=0)                    # whole: by the UDP socket, once
send(other_version, cut_bytes=100)                  # cut: by the packet socket
send(b"\\x7c\\x02\\x01" + bytes(300), cut_bytes=300) # within the header of tailcut
goodbye = struct.pack("<BBBBHHQ46xH", 0x7C, 2, 3, 0, 0, 1, 7, 8) + bytes(64)
send(goodbye, cut_bytes=32)                         # of rank 1, from where it is
send(goodbye, cut_bytes=32, source_port=5556)       # and from elsewhere
send(b"\\x7c\\x02\\x01" + bytes(300))               # another group's: the last one
"""


def in_namespace(name: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    argv = ["ip", "netns", "exec", name, sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("permitted", "cut"), [("permitted", 4), ("not permitted", 0)])
def test_exactly_the_cut_packets_come_by_the_packet_socket(
    two_hosts: tuple[str, str], permitted: str, cut: int
) -> None:
    shown = subprocess.check_output(["ip", "-j", "-n", two_hosts[1], "link", "show", LINKS[1]])
    mac = json.loads(shown)[0]["address"]
    with in_namespace(two_hosts[1], RECEIVER, permitted, ADDRESSES[0]) as receiver:
        assert receiver.stdout
        port = receiver.stdout.readline().strip()
        with in_namespace(two_hosts[0], SENDER, LINKS[0], mac, port, *ADDRESSES) as sender:
            assert sender.wait() == 0
        counts = json.loads(receiver.stdout.readline())
    assert counts["uncorrected"] == cut
    assert counts["version"] == (2 if cut else 1)
    assert counts["short"] == (1 if cut else 0)
    assert counts["address"] == (1 if cut else 0)
    assert counts["group"] == 1
    assert sum(counts.values()) == cut + counts["version"] + counts["short"] + counts["address"] + 1


RANK = """
import os, sys
from pathlib import Path
from tailcut import Config, FileStore, Group

rank, directory, asked = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "asked"
config = Config(trim_bytes=256, **({"receive_uncorrected": True} if asked else {}))
with Group(rank, 2, FileStore(directory), config) as group:
    print(group.codec, len(Path("/proc/net/packet").read_text().splitlines()) - 1)
    print("are received too" in group.describe())
"""


@pytest.mark.parametrize(
    ("asked", "printed"), [("asked", "planes 1\nTrue\n"), ("not asked", "planes 0\nFalse\n")]
)
def test_a_packet_socket_is_opened_only_if_asked_for(
    tmp_path: Path, two_hosts: tuple[str, str], asked: str, printed: str
) -> None:
    """It is in front of the firewall and checks no checksums: that a switch trims is not reason enough."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(in_namespace(host, RANK, str(rank), str(tmp_path), asked))
            for rank, host in enumerate(two_hosts)
        ]
        assert [rank.communicate()[0] for rank in ranks] == [printed] * 2


def test_a_packet_socket_that_is_not_permitted_is_refused() -> None:
    """As an ordinary user, who has no CAP_NET_RAW."""
    script = """
    import os
    from tailcut import ConfigError, Group
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        Group(0, 1, store=None, receive_uncorrected=True)
    except ConfigError as error:
        print(error)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert "receive_uncorrected=True" in ended.stdout
    assert "Operation not permitted" in ended.stdout
    assert "grant CAP_NET_RAW" in ended.stdout
