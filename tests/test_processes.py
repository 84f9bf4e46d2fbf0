"""Groups across real processes: peers that freeze, die, fork, are interrupted, or live in another network."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tailcut import Config, FileStore, Group, _native
from tests.netns import LINKS, set_mtu
from tests.oracle import rank_order_mean

LIMIT_S = 60  # only a hang takes longer

PRELUDE = """
import hashlib, os, sys
import numpy as np
from tailcut import *
rank, ranks, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def say(word): print(word, flush=True)
def hear(): return sys.stdin.readline().strip()
def open_group(**config): return Group(rank, ranks, FileStore(directory), Config(**config))
"""


class Worker:
    """A rank in a process of its own. Speaks and listens in lines."""

    def __init__(
        self, rank: int, ranks: int, directory: Path, script: str, prefix: tuple[str, ...] = ()
    ) -> None:
        code = PRELUDE + textwrap.dedent(script)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, str(rank), str(ranks), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        assert self.process.stdin
        print(word, file=self.process.stdin, flush=True)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


@contextlib.contextmanager
def workers(directory: Path, ranks: range, world: int, script: str) -> Iterator[list[Worker]]:
    started = [Worker(rank, world, directory, script) for rank in ranks]
    try:
        yield started
    finally:
        for worker in started:
            with contextlib.suppress(ProcessLookupError):
                worker.signal(signal.SIGKILL)
            worker.process.communicate(timeout=LIMIT_S)


FOLLOW = """
with open_group(deadline_s=1.0) as group:
    say("open")
    while hear() == "op":
        array = np.full(4096, rank, np.float32)
        report = group.allreduce(array).wait()
        say(f"{report.status} {report.behind_ops} {report.lost_frac} {sorted(set(array.tolist()))}")
"""


def step(group: Group) -> tuple[str, tuple[int, ...], float]:
    array = np.full(4096, 0.0, np.float32)
    report = group.allreduce(array).wait()
    return report.status, report.missing_from, report.lost_frac


def test_a_killed_rank_costs_its_share_and_no_more(tmp_path: Path) -> None:
    with workers(tmp_path, range(1, 3), 3, FOLLOW) as (one, two):
        with Group(0, 3, FileStore(tmp_path), Config(deadline_s=1.0)) as group:
            one.say("op"), two.say("op")
            assert step(group) == ("complete", (), 0.0)
            two.signal(signal.SIGKILL)
            for _ in range(3):
                one.say("op")
                status, missing, lost = step(group)
                assert (status, missing) == ("partial", (2,))
                assert lost == pytest.approx(1 / 3, abs=0.02)
            one.say("end")
        code, out, err = one.end()
        assert code == 0, err
        assert out.split("\n")[-2].startswith("partial 0 0.3")


def test_the_share_of_a_killed_rank_comes_back(tmp_path: Path) -> None:
    quiet = FOLLOW.replace("deadline_s=1.0", "deadline_s=1.0, straggler_share=1.0")
    with workers(tmp_path, range(1, 3), 3, quiet) as (one, two):
        with Group(0, 3, FileStore(tmp_path), Config(deadline_s=1.0, straggler_share=1.0)) as group:
            one.say("op"), two.say("op")
            assert step(group) == ("complete", (), 0.0)
            two.signal(signal.SIGKILL)
            for _ in range(100):  # ops take some milliseconds, and the store some as well
                one.say("op")
                if step(group)[2] == 0.0:
                    break
            one.say("op")
            assert step(group) == ("complete", (), 0.0)  # the dead are no members, and nothing lacks them
            assert (group.stats().epoch, group.stats().owner_weights) == (1, (1, 1, 0))
            one.say("end")
        code, out, err = one.end()
        assert code == 0, err
        assert out.split("\n")[-2] == "complete 0 0.0 [0.5]"


def test_a_frozen_rank_finds_its_results_when_it_is_released(tmp_path: Path) -> None:
    with workers(tmp_path, range(1, 3), 3, FOLLOW) as (one, two):
        with Group(0, 3, FileStore(tmp_path), Config(deadline_s=1.0)) as group:
            for follower in (one, two):
                assert follower.hear() == "open"
                follower.say("op")
            assert step(group) == ("complete", (), 0.0)
            assert two.hear().startswith("complete")
            two.signal(signal.SIGSTOP)
            for _ in range(3):
                one.say("op"), two.say("op")
                assert step(group)[:2] == ("partial", (2,))
            two.signal(signal.SIGCONT)
            one.say("op"), two.say("op")
            for _ in range(3):  # the results of the others, from the history of their owners
                status, behind, lost, *values = two.hear().split()
                assert (status, behind) == ("complete", "0")
                assert float(lost) < 0.35  # its own shard, to the granule
                assert "0.5" in " ".join(values)
            one.say("end"), two.say("end")
            step(group)
        assert one.end()[0] == 0
        assert two.end()[0] == 0


def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on(tmp_path: Path) -> None:
    script = """
    import gc
    group = open_group()
    work = group.allreduce(np.ones(4096, np.float32))
    child = os.fork()
    if child == 0:
        for attempt in (lambda: group.allreduce(np.ones(4, np.float32)), work.wait, group.stats):
            try:
                attempt()
            except ClosedError as error:
                say(f"child: {error}")
        group.close()
        del group, work
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say("parent: " + work.wait().status)
    group.allreduce(np.ones(4096, np.float32)).wait()
    group.close()
    """
    with workers(tmp_path, range(1, 2), 2, script) as (forker,):
        with Group(0, 2, FileStore(tmp_path)) as group:
            assert [forker.hear().split(" process ")[0] for _ in range(3)] == [
                "child: this group belongs to"
            ] * 3
            assert step(group)[0] == "complete"
            assert forker.hear() == "parent: complete"
            assert step(group)[0] == "complete"
        code, _, err = forker.end()
        assert (code, err) == (0, "")


WAIT_FOR_EVER = """
with open_group(deadline_s=3600) as group:
    work = group.allreduce(np.ones(4096, np.float32))
    say("waiting")
    work.wait()
"""


def test_ctrl_c_ends_a_wait_at_once(tmp_path: Path) -> None:
    with (
        workers(tmp_path, range(1, 2), 2, WAIT_FOR_EVER) as (waiter,),
        Group(0, 2, FileStore(tmp_path)) as group,
    ):
        assert waiter.hear() == "waiting"
        waiter.signal(signal.SIGINT)
        code, _, err = waiter.end()
        assert code == -signal.SIGINT
        assert "KeyboardInterrupt" in err
        status, _, _ = step(group)  # it said goodbye: nobody waits for it
        assert status == "complete"


def test_ctrl_c_ends_a_lingering_close_at_once(tmp_path: Path) -> None:
    script = """
    group = open_group(deadline_s=3600)
    say("closing")
    group.close()
    """
    with workers(tmp_path, range(1, 2), 2, script) as (closer,), Group(0, 2, FileStore(tmp_path)):
        assert closer.hear() == "closing"
        closer.signal(signal.SIGINT)
        code, _, err = closer.end()
        assert code == -signal.SIGINT, err


@pytest.mark.parametrize(
    "ending",
    ["", "raise SystemExit(3)", "raise RuntimeError('user error')", "os.kill(os.getpid(), 15)", "os.abort()"],
    ids=["falls-off-the-end", "exits", "raises", "is-terminated", "aborts"],
)
def test_a_process_that_ends_in_any_way_does_not_hang_nor_hold_up_its_peer(
    tmp_path: Path, ending: str
) -> None:
    script = f"""
    group = open_group(deadline_s=3600)
    work = group.allreduce(np.ones(4096, np.float32))
    {ending}
    """
    config = Config(deadline_s=1.0)
    with (
        workers(tmp_path, range(1, 2), 2, script) as (leaver,),
        Group(0, 2, FileStore(tmp_path), config) as group,
    ):
        leaver.end()
        assert step(group)[0] in ("complete", "partial")


# ---- network namespaces ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mtu", "settings", "payload_bytes"),
    [
        (1500, {"TAILCUT_CODEC": "raw"}, 1280),
        pytest.param(9000, {"TAILCUT_CODEC": "raw"}, 8704, marks=pytest.mark.long),
        pytest.param(1500, {"TAILCUT_PLANES": "16"}, 1424, marks=pytest.mark.long),
        pytest.param(9000, {"TAILCUT_PLANES": "16"}, 8208, marks=pytest.mark.long),
        (9000, {"TAILCUT_PLANES": "16", "TAILCUT_TRIM_BYTES": "256"}, 2576),
        (1500, {"TAILCUT_PLANES": "4"}, 1424),
    ],
    ids=["raw, 1500", "raw, 9000", "16, 1500", "16, 9000", "16 that may be trimmed, 9000", "4, 1500"],
)
def test_packets_between_hosts_follow_the_path_mtu(
    tmp_path: Path,
    two_hosts: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    mtu: int,
    settings: dict[str, str],
    payload_bytes: int,
) -> None:
    for name, link in zip(two_hosts, LINKS, strict=True):
        set_mtu(name, link, mtu)
    for variable, text in settings.items():
        monkeypatch.setenv(variable, text)
    script = """
    with open_group() as group:
        array = np.random.default_rng(rank).standard_normal(200_000, np.float32)
        report = group.allreduce(array).wait()
        np.save(f"{rank}.npy", array)
        say(f"{report.status} {report.traffic.sent_bytes / report.traffic.sent_packets:.0f} {group.codec}")
    """
    monkeypatch.chdir(tmp_path)
    members = [
        Worker(rank, 2, tmp_path, script, ("ip", "netns", "exec", name))
        for rank, name in enumerate(two_hosts)
    ]
    inputs = [np.random.default_rng(rank).standard_normal(200_000, np.float32) for rank in range(2)]
    for member in members:
        code, out, err = member.end()
        assert code == 0, err
        status, mean_bytes, codec = out.split()
        assert (status, codec) == ("complete", settings.get("TAILCUT_CODEC", "planes"))
        # Less than a packet each: a shard ends with short ones, and an op with means that are yet to be sent.
        assert payload_bytes * 0.8 < int(mean_bytes) <= payload_bytes + _native.HEADER_BYTES
    mean = rank_order_mean(inputs)
    first, second = (np.load(f"{rank}.npy") for rank in range(2))
    assert first.tobytes() == second.tobytes()
    tolerance = {"16": 1e-3, "4": 1.0}[settings["TAILCUT_PLANES"]] if codec == "planes" else 0
    assert np.abs(first - mean).max() <= tolerance
