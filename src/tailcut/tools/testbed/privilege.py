"""Who may build networks: root, or anybody inside a user namespace of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tailcut.errors import ConfigError
from tailcut.tools.testbed import system

UNSHARE = ("--user", "--map-root-user", "--net", "--mount")
_OURS = Path("/run/.tailcut")


def become_root_of_a_namespace() -> None:
    """Without root, start this command again inside a user namespace. Then this does not return."""
    if os.geteuid() == 0 and (not system.in_user_namespace() or _mounts_are_private()):
        return
    unshare = system.program("unshare")
    tried = subprocess.run([unshare, *UNSHARE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise ConfigError(
            f"without root the testbed needs user namespaces, and {tried.stderr.strip()}: "
            "run it as root, or allow them "
            "(sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0)"
        )
    os.execv(unshare, [unshare, *UNSHARE, sys.executable, *sys.argv])


def require_networks() -> None:
    """Raise unless this process may create namespaces. Inside a user namespace, make room for their names."""
    confined = system.in_user_namespace()
    if os.geteuid() != 0 or (confined and not _mounts_are_private()):
        raise ConfigError(f"a testbed needs root, or to be inside: unshare {' '.join(UNSHARE)} COMMAND")
    if confined and not _OURS.exists():
        system.run("mount", "-t", "tmpfs", "tmpfs", "/run")
        _OURS.touch()


def _mounts_are_private() -> bool:
    """Return whether nobody else sees what is mounted here. All processes of a container share its mounts."""
    try:
        return os.readlink("/proc/self/ns/mnt") != os.readlink("/proc/1/ns/mnt")
    except PermissionError:
        return True
