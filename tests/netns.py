"""Two hosts that are network namespaces of this one, and what may be wrong with the path between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

LINKS = ("veth-a", "veth-b")
CLONE_NEWNET = 0x40000000  # linux/sched.h
ADDRESSES = ("10.111.0.1", "10.111.0.2")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root for namespaces")


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a veth pair, addresses 10.111.0.1 and .2; gone afterwards."""
    if os.geteuid() != 0:
        pytest.skip(
            "NOT RUN: network namespaces need root; run the tests as root to cover path MTU and routes"
        )
    names = (f"tailcut-{os.getpid()}-a", f"tailcut-{os.getpid()}-b")
    near, far = LINKS
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            *f"ip link add {near} netns {names[0]} type veth peer name {far} netns {names[1]}".split(),
        )
        for name, link, address in zip(names, LINKS, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


@pytest.fixture
def loopback_names(two_hosts: tuple[str, str]) -> Iterator[None]:
    """Inside the namespaces the host's name means 127.0.1.1, as Debian's installer leaves it."""
    directories = [Path("/etc/netns", name) for name in two_hosts]
    try:
        for directory in directories:
            directory.mkdir(parents=True)
            (directory / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
        yield
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # unless somebody else has a namespace there


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread is in the named network namespace; sockets that it opens stay there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{name}") as away:
        assert libc.setns(away.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def set_mtu(name: str, link: str, mtu_bytes: int) -> None:
    _run("ip", "-n", name, "link", "set", link, "mtu", str(mtu_bytes))


def drop_leaving(name: str, link: str, *matches: str) -> None:
    """Drop what leaves by a link and matches, e.g. ``u8 17 0xff at 9``: offsets are from the IP header.

    A queue of no packets behind a class, as kernels without tc actions have it too.
    """
    tc = ("ip", "netns", "exec", name, "tc")
    on_link = ("dev", link, "parent", "1:")
    _run(*tc, "qdisc", "add", "dev", link, "root", "handle", "1:", "htb", "default", "1")
    for classid in ("1:1", "1:2"):
        _run(
            *tc, "class", "add", *on_link, "classid", classid, *["htb", "rate", "10gbit", "quantum", "60000"]
        )
    _run(*tc, "qdisc", "add", "dev", link, "parent", "1:2", "pfifo", "limit", "0")
    words = [word for match in matches for word in ("match", *match.split())]
    _run(*tc, "filter", "add", *on_link, "protocol", "ip", "u32", *words, "flowid", "1:2")


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
