"""Finds and runs the programs that build a testbed, and explains their failures."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tailcut.errors import ConfigError

_PACKAGES = {
    "bpftool": "bpftool",
    "bridge": "iproute2",
    "clang": "clang",
    "ethtool": "ethtool",
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "tc": "iproute2",
    "umount": "mount",
    "unshare": "util-linux",
}


@cache
def program(name: str) -> str:
    """Return the path of a program. Root's programs are not on everybody's PATH."""
    found = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    if found is None:
        raise ConfigError(
            f"the testbed needs {name}: apt-get install {_PACKAGES[name]} (or what your system calls it)"
        )
    return found


def run(name: str, *words: str, stdin: str = "", check: bool = True) -> str:
    """Run one of them to its end and return what it printed."""
    done = subprocess.run([program(name), *words], input=stdin, text=True, capture_output=True, check=False)
    if check and done.returncode:
        raise ConfigError(f"{name} {' '.join(words)} failed: {_reason(done.stderr, stdin)}")
    return done.stdout


def batch(name: str, lines: Sequence[str], namespace: str | None = None, *, check: bool = True) -> None:
    """Run many commands of ip, tc or bridge in one process. Without ``check`` all are run, whatever fails."""
    place = () if namespace is None else ("-n", namespace)
    force = () if check else ("-force",)
    if lines:
        run(name, *place, *force, "-batch", "-", stdin="\n".join(lines) + "\n", check=check)


def in_user_namespace() -> bool:
    """Return whether this is a user namespace, where root may build networks but load no BPF programs."""
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]


def outer_uid() -> int:
    """Return who runs this, as seen from outside a user namespace of one user."""
    return int(Path("/proc/self/uid_map").read_text().split()[1]) + os.geteuid()


def _reason(stderr: str, stdin: str) -> str:
    """Return the first complaint, and for a batch also the command that it is about."""
    text = stderr.strip().splitlines() or ["no reason given"]
    if "kind is unknown" in text[0]:
        text[0] += " This kernel lacks it."
    for line in text:
        number = line.removeprefix("Command failed -:")
        if number != line and number.isdigit():
            return f"{text[0]} ({stdin.splitlines()[int(number) - 1]})"
    return text[0]
