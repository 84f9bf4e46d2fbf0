"""Makes programs hang: their main threads stand still, and all other threads go on. hang.py is the agent.

It is a process of its own: whoever waits for a child takes the stop of a thread that it traces itself
for the end of the child.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tailcut.errors import ConfigError

READY, DONE = "ready", "done"


class MainThreads:
    """Speaks to the agent, which answers every line with a line."""

    def __init__(self, agent: subprocess.Popen[bytes]) -> None:
        self._agent = agent
        self._expect(READY)

    def tell(self, action: str, host: int, groups: Sequence[int]) -> None:
        """Make the processes of these groups hang, or let all that hang on the host resume."""
        assert self._agent.stdin
        self._agent.stdin.write(" ".join(map(str, (action, host, *groups, "\n"))).encode())
        self._agent.stdin.flush()
        self._expect(DONE)

    def _expect(self, word: str) -> None:
        assert self._agent.stdout
        said = self._agent.stdout.readline().decode().strip()
        if said != word:
            raise ConfigError(
                f"this scenario makes programs hang, which needs ptrace: {said or 'the agent has ended'}"
            )
