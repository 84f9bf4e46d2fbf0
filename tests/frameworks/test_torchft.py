"""torchft: a replica is killed and comes back, and the gradients of the other one are bounded meanwhile."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchft.coordination import LighthouseServer

from tests.frameworks.checks import DEADLINE_S, LIMIT_S
from tests.launch import Worker, workers


def replica(stack: ExitStack, directory: Path, name: str, lighthouse: str) -> Worker:
    script = "frameworks.replica_torchft"
    [worker] = stack.enter_context(workers(directory, 1, script, name, lighthouse, limit_s=LIMIT_S))
    return worker


def together(*replicas: Worker) -> list[dict[str, Any]]:
    """One step of each."""
    for one in replicas:
        one.say("go")
    return [one.hear() for one in replicas]


def test_a_killed_replica_comes_back_and_steps_are_bounded_meanwhile(tmp_path: Path) -> None:
    server = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=500, heartbeat_timeout_ms=1000)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    steps: list[dict[str, Any]] = []  # of the one that is never killed
    with ExitStack() as stack:
        survivor, victim = (replica(stack, tmp_path, name, address) for name in ("survivor", "victim"))
        for one in (survivor, victim):
            assert one.hear() == "ready"
        while not steps or steps[-1]["replicas"] < 2:
            steps.append(together(survivor, victim)[0])
        victim.signal(signal.SIGKILL)
        while steps[-1]["replicas"] > 1:
            steps += together(survivor)
        back = replica(stack, tmp_path, "back", address)
        assert back.hear() == "ready"  # nobody steps meanwhile: torchft logs every step to a pipe
        back.say("go")
        while steps[-1]["replicas"] < 2:
            steps += together(survivor)
        back.hear()
        *_, (last, last_of_back) = [together(survivor, back) for _ in range(5)]
        for one in (survivor, back):
            one.say("end")
            code, err = one.end()
            assert code == 0, err
    server.shutdown()
    assert all(step["ops"] > 0 for step in steps)
    longest_s = max(step["took_s"] for step in [*steps, last])
    print(f"longest backward pass of the survivor: {longest_s:.3f} s")  # pytest -rP shows it
    assert longest_s <= 2 * DEADLINE_S, f"a step took {longest_s:.3f} s"
    assert (last["step"], last["digest"]) == (last_of_back["step"], last_of_back["digest"])
