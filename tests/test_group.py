"""Group over real sockets on loopback: results, errors, memory."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailcut import ClosedError, Config, ConfigError, FileStore, Group, Report, TailcutError
from tests.groups import allreduce, open_groups, vectors
from tests.oracle import rank_order_mean
from tests.reports import abstained

SETTINGS = {
    "default": {},
    "system-receive-buffer": {"receive_buffer_bytes": 0},
    "tiny-receive-buffer": {"receive_buffer_bytes": 20_000},
    "mtu-sized-packets": {"packet_bytes": 1280},
    "mtu-sized-packets-without-offload": {"packet_bytes": 1280, "offload": False},
    "granule-sized-packets": {"packet_bytes": 256},
    "explicit-address": {"address": "127.0.0.1"},
    "another-loopback-address": {"address": "127.0.0.2"},
    "two-lanes": {"lanes": 2},
    "small-pool": {"pool_bytes": 1 << 16},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_without_loss_every_rank_holds_the_rank_order_mean(tmp_path: Path, settings: dict) -> None:
    with open_groups(tmp_path, 4, **settings) as groups:
        for length in (0, 1, 63, 64, 65, 1000, 300_001):
            arrays = vectors(4, length)
            expected = rank_order_mean(arrays).tobytes()
            reports = allreduce(groups, arrays)
            assert [report.status for report in reports] == ["complete"] * 4
            assert all(array.tobytes() == expected for array in arrays)
        assert all(group.stats().lost_coordinates == 0 for group in groups)


def test_segmentation_offload_is_used_where_the_kernel_has_it_and_only_if_asked(tmp_path: Path) -> None:
    for offload in (True, False):
        with open_groups(tmp_path / str(offload), 2, packet_bytes=1280, offload=offload) as groups:
            allreduce(groups, vectors(2, 300_000))
            groups[0].close(linger_s=0)
            socket = groups[0]._ops.lanes[0].stats().socket
            assert (socket.segmented_sends > 0) == offload
            assert (socket.coalesced_receives > 0) == offload


def test_several_ops_in_flight(tmp_path: Path) -> None:
    with open_groups(tmp_path, 3, lanes=2) as groups:
        buckets = [vectors(3, 1000 + 5000 * k, seed=k) for k in range(20)]
        expected = [rank_order_mean(arrays).tobytes() for arrays in buckets]
        works = [
            groups[rank].allreduce(arrays[rank], key=f"bucket-{k}")
            for k, arrays in enumerate(buckets)
            for rank in range(3)
        ]
        assert all(work.wait().status == "complete" for work in works)
        for arrays, mean in zip(buckets, expected, strict=True):
            assert all(array.tobytes() == mean for array in arrays)


def test_a_group_of_one_returns_what_it_was_given(tmp_path: Path) -> None:
    with Group(0, 1, FileStore(tmp_path)) as group:
        array = np.arange(100, dtype=np.float32).reshape(4, 25)
        assert group.allreduce(array).wait().status == "complete"
        assert np.array_equal(array, np.arange(100).reshape(4, 25))


class Interface:
    """An array as another library has it, known by its interface only."""

    def __init__(self, values: list[float]) -> None:
        self._values = np.array(values, np.float32)
        self.__array_interface__ = self._values.__array_interface__

    def tolist(self) -> list[float]:
        return self._values.tolist()


MEMORY: dict[str, Callable[[list[float]], Any]] = {
    "NumPy": lambda values: np.array(values, np.float32),
    "array.array": lambda values: array("f", values),
    "memoryview": lambda values: memoryview(bytearray(np.array(values, np.float32).tobytes())).cast("f"),
    "tensor": torch.Tensor,
    "tensor with two dimensions": lambda values: torch.Tensor(values).reshape(2, -1),
    "parameter": lambda values: torch.nn.Parameter(torch.Tensor(values)),
    "array interface": Interface,
}


@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)
def test_any_contiguous_float32_memory_is_averaged_in_place(
    tmp_path: Path, make: Callable[[list[float]], Any]
) -> None:
    with open_groups(tmp_path, 2) as groups:
        sources = make([1, 2, 3, 4]), make([3, 6, 9, 12])
        reports = allreduce(groups, sources)
        assert [report.status for report in reports] == ["complete"] * 2
        assert [np.ravel(source.tolist()).tolist() for source in sources] == [[2, 4, 6, 8]] * 2


def test_memory_outlives_the_object_that_was_passed(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2) as groups:
        kept = memoryview(bytearray(4000))
        works = [group.allreduce(kept.cast("f") if group.rank else torch.ones(1000)) for group in groups]
        gc.collect()
        assert [work.wait().status for work in works] == ["complete"] * 2
        assert set(kept.cast("f").tolist()) == {0.5}


def test_done_does_not_block_while_another_thread_waits(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2, deadline_s=5.0) as groups:
        work = groups[0].allreduce(np.ones(100, np.float32))
        waiting = threading.Event()
        take = groups[0]._ops.take

        def told(lane: int, ticket: int, timeout_ns: int) -> Report | TailcutError | None:
            waiting.set()
            return take(lane, ticket, timeout_ns)

        groups[0]._ops.take = told  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:
            waited = pool.submit(work.wait)
            assert waiting.wait(60)
            assert not work.done()  # rank 1 has not entered: blocking, it would come back at the deadline
            groups[1].allreduce(np.ones(100, np.float32)).wait()
            assert waited.result() is work.wait()
        assert work.done()


def test_a_rank_that_does_not_come_costs_its_share_not_the_step(tmp_path: Path) -> None:
    with open_groups(tmp_path, 3, linger_s=0, deadline_s=1.0) as groups:
        arrays = vectors(3, 3000)
        inputs = [array.copy() for array in arrays]
        reports = allreduce(groups[:2], arrays[:2])
        for report, array in zip(reports, arrays, strict=False):
            assert report.status == "complete"  # the engine of rank 2 serves its shard meanwhile
            assert report.links[2].scatter.lost_frac == 1
            assert report.missing_from == (2,)
            assert np.array_equal(array, rank_order_mean(inputs[:2]))


def test_a_peer_that_leaves_is_not_waited_for(tmp_path: Path) -> None:
    with open_groups(tmp_path, 3, deadline_s=30.0) as groups:
        allreduce(groups, vectors(3, 100))
        groups[2].close(linger_s=0)
        reports = allreduce(groups[:2], vectors(2, 3000))
        assert [report.status for report in reports] == ["complete"] * 2
        assert abstained(reports[0]) == (2,)


# ---- errors ------------------------------------------------------------------------------------------------


class OnDevice:
    """An array as another library has it, in the memory of a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


@pytest.fixture
def lone(tmp_path: Path):
    with Group(0, 1, FileStore(tmp_path)) as group:
        yield group


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([1.0, 2.0], "float32 in host memory.* not list"),
        (np.zeros(4), "float32, not float64"),
        (np.zeros(8, np.float32)[::2], "contiguous"),
        (np.broadcast_to(np.zeros(1, np.float32), 1)[:0], "read-only"),
        (array("d", [1.0]), "float32, not float64"),
        (bytearray(8), "float32, not uint8"),
        (memoryview(bytes(8)).cast("f"), "read-only"),
        (memoryview(bytearray(16)).cast("f")[::2], "contiguous"),
        (torch.ones(2, dtype=torch.bfloat16), r"float32, not torch.bfloat16; convert it with .float\(\)"),
        (torch.ones(2, 3).t(), "contiguous"),
        (torch.ones(2, device="meta"), "host memory, and this tensor is on meta"),
        (torch.ones(2, 2).to_sparse(), "this tensor has no plain memory"),
        (OnDevice(), "host memory, and this OnDevice is on a device"),
    ],
)
def test_what_cannot_be_reduced_in_place_is_refused(lone: Group, source, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lone.allreduce(source)
    good = np.ones(4, np.float32)
    assert lone.allreduce(good).wait().status == "complete"  # nothing was lost


def test_a_key_still_in_flight_is_refused(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2, linger_s=0, deadline_s=0.2) as groups:
        work = groups[0].allreduce(np.ones(4, np.float32), key="layer1")
        with pytest.raises(ConfigError, match="'layer1' is still in flight"):
            groups[0].allreduce(np.ones(4, np.float32), key="layer1")
        work.wait()
        groups[0].allreduce(np.ones(4, np.float32), key="layer1").wait()


def test_a_closed_group_says_so(tmp_path: Path) -> None:
    group = Group(0, 1, FileStore(tmp_path))
    group.close()
    group.close()  # twice is fine
    with pytest.raises(ClosedError, match="closed"):
        group.allreduce(np.zeros(4, np.float32))


def test_closing_under_an_op_ends_it_with_an_error(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2, linger_s=0, deadline_s=60.0) as groups:
        work = groups[0].allreduce(np.ones(4, np.float32))
        groups[0].close(linger_s=0)
        for _ in range(2):  # asking again says the same
            with pytest.raises(ClosedError, match="closed before the op ended"):
                work.wait()


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_engine_that_fails_ends_its_group_with_an_error_and_no_other_group(
    tmp_path: Path, lanes: int
) -> None:
    """As when a program that becomes a daemon closes all descriptors and opens files under their numbers."""
    with (
        open_groups(tmp_path / "failing", 2, linger_s=0, deadline_s=60.0, lanes=lanes) as groups,
        open_groups(tmp_path / "other", 2) as others,
        open(os.devnull) as file,
    ):
        allreduce(groups, vectors(2, 100))
        descriptor = groups[0]._ops.lanes[0].descriptor
        works = [groups[0].allreduce(np.ones(100, np.float32)) for _ in range(lanes)]
        os.dup2(file.fileno(), descriptor)
        for _ in range(2):  # asking again says the same
            with pytest.raises(ClosedError, match=r"its engine failed: recvmmsg: .*non-socket"):
                works[-1].wait()  # the one on the first lane
        for _ in range(2):  # on whichever lane it would be
            with pytest.raises(ClosedError, match=r"its engine failed: recvmmsg: .*non-socket"):
                groups[0].allreduce(np.ones(100, np.float32))
        assert [report.status for report in allreduce(others, vectors(2, 100))] == ["complete"] * 2
        groups[0].close(linger_s=0)
        os.close(descriptor)  # which the group must not have done: it is not its own any more


def test_mismatched_lengths_are_an_error_on_both_of_two_ranks(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2) as groups:
        works = [groups[rank].allreduce(np.ones(100 + rank, np.float32)) for rank in range(2)]
        for work in works:
            with pytest.raises(ConfigError, match=r"rank 0: 100, rank 1: 101"):
                work.wait()
        assert all(report.status == "complete" for report in allreduce(groups, vectors(2, 10)))


def test_mismatched_lengths_are_an_error_on_the_offender_only(tmp_path: Path) -> None:
    with open_groups(tmp_path, 3) as groups:
        works = [
            groups[rank].allreduce(np.full(100 + 50 * (rank == 1), rank, np.float32)) for rank in range(3)
        ]
        with pytest.raises(ConfigError, match=r"this rank \(rank 1\) passed 150"):
            works[1].wait()
        assert works[0].wait().status == works[2].wait().status == "complete"


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, 70_000)])
def test_a_rank_outside_the_world_is_refused(tmp_path: Path, rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError):
        Group(rank, world_size, FileStore(tmp_path))


def test_an_address_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        Group(0, 1, FileStore(tmp_path), Config(address="192.0.2.1"))


def test_packets_larger_than_the_path_carries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be 0 or between"):
        Config(packet_bytes=100_000)


# ---- what is kept, and for how long ------------------------------------------------------------------------


def test_a_dropped_work_keeps_its_array_until_the_op_has_ended(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2) as groups:
        array = np.ones(1000, np.float32)
        alive = weakref.ref(array)
        groups[0].allreduce(array, key="a")
        del array
        gc.collect()
        assert alive() is not None
        groups[1].allreduce(np.ones(1000, np.float32), key="a").wait()
        allreduce(groups, vectors(2, 10))  # op 0 is over on both ranks
        groups[0].allreduce(np.ones(10, np.float32), key="a")
        groups[1].allreduce(np.ones(10, np.float32), key="a").wait()
        gc.collect()
        assert alive() is None
        assert groups[0].stats().ops == 2  # the third was not waited for either


def test_a_group_dropped_without_close_stops_before_its_arrays_go(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2, linger_s=0) as groups:
        array = np.ones(300_000, np.float32)
        groups[0].allreduce(array)
        threads = len(os.listdir("/proc/self/task"))
        dropped = weakref.ref(groups.pop(0))
        gc.collect()
        assert dropped() is None
        assert len(os.listdir("/proc/self/task")) == threads - 1


def test_a_report_stays_until_it_is_recorded(tmp_path: Path) -> None:
    """Ctrl-C may come between the native wait and its record: the next wait() finds the report again."""
    with Group(0, 1, FileStore(tmp_path)) as group:
        work = group.allreduce(np.ones(10, np.float32))
        lane, ticket = group._ops.lanes[0], work._flight.ticket
        assert lane.wait(ticket, 10**10) is not None  # what an interrupted wait() would have dropped
        assert work.wait().status == "complete"
        assert group.stats().ops == 1


def test_two_threads_may_wait_for_the_same_work(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2) as groups:
        work = groups[0].allreduce(np.ones(1000, np.float32))
        reports: list[Report] = []
        threads = [threading.Thread(target=lambda: reports.append(work.wait())) for _ in range(2)]
        for thread in threads:
            thread.start()
        groups[1].allreduce(np.ones(1000, np.float32)).wait()
        for thread in threads:
            thread.join()
        assert reports[0] is reports[1]
        assert work.done()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.long
def test_memory_is_bounded_and_does_not_grow_over_ten_thousand_ops(tmp_path: Path) -> None:
    length = 4096
    with open_groups(tmp_path, 2) as groups:
        arrays = vectors(2, length)

        def run(ops: int) -> int:
            for _ in range(ops):
                allreduce(groups, arrays)
            gc.collect()
            return resident_bytes()

        warm = run(1000)
        assert run(10_000) - warm < 1 << 20
        for group in groups:
            group.close(linger_s=0)
            lane = group._ops.lanes[0].stats()
            assert lane.memory_bytes <= 3 * length * 4 + lane.pool_used_bytes


def test_memory_in_flight_is_at_most_three_times_the_buckets(tmp_path: Path) -> None:
    with open_groups(tmp_path, 4) as groups:
        in_flight = 4
        for round_ in range(10):
            buckets = [vectors(4, 100_000, seed=round_ * in_flight + k) for k in range(in_flight)]
            works = [group.allreduce(arrays[group.rank]) for arrays in buckets for group in groups]
            for work in works:
                work.wait()
        for group in groups:
            group.close(linger_s=0)
            lane = group._ops.lanes[0].stats()
            assert lane.memory_bytes <= 3 * in_flight * 100_000 * 4 + group.config.pool_bytes
            assert lane.memory_bytes <= 3 * in_flight * 100_000 * 4 + 2 * in_flight * 100_000 * 4


def test_closing_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    with Group(0, 1, FileStore(tmp_path / "warm")):
        pass
    gc.collect()
    before = counts()
    group = Group(0, 1, FileStore(tmp_path / "lanes"), Config(lanes=4))
    assert counts() != before
    group.close()
    assert counts() == before


def test_a_rank_alone_keeps_its_vector_whatever_the_codec(tmp_path: Path) -> None:
    with Group(0, 1, FileStore(tmp_path), Config(codec="planes", planes=1)) as group:
        vector = np.random.default_rng(0).standard_normal(1000, np.float32)
        expected = vector.copy()
        group.allreduce(vector).wait()
    assert vector.tobytes() == expected.tobytes()


def test_stats_tell_the_derived_bounds_and_the_verdicts(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2, deadline_s=8.0) as groups:
        assert groups[0].stats().bounds == {}
        for _ in range(8):
            reports = allreduce(groups, vectors(2, 1000))
        assert all(len(report.verdicts) == 2 for report in reports)
        stats = groups[0].stats()
        assert list(stats.bounds) == [1000]
        assert 0 < stats.bounds[1000].scatter_s < 4.0
        assert [sum(counts.values()) for counts in stats.verdicts] == [8, 8]
        assert stats.drop_share == (0.0, 0.0)


def test_without_adaption_bounds_are_those_of_the_deadline(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2, deadline_s=8.0, adaptive=False) as groups:
        for _ in range(8):
            allreduce(groups, vectors(2, 1000))
        bounds = groups[0].stats().bounds[1000]
        assert (bounds.scatter_s, bounds.gather_s) == (4.0, 8.0)


def test_an_alarm_is_a_warning_where_the_caller_waits_and_costs_no_report(tmp_path: Path) -> None:
    with open_groups(tmp_path, 1) as (group,):
        group._steering._row._alarms.append("tailcut: a rank is dropped")
        with pytest.warns(RuntimeWarning, match="a rank is dropped") as caught:
            group.allreduce(np.zeros(10, np.float32)).wait()
        assert caught[0].filename == __file__
        group._steering._row._alarms.append("tailcut: a rank is dropped")
        work = group.allreduce(np.zeros(10, np.float32))
        with pytest.raises(RuntimeWarning):
            work.wait()
        assert work.wait().status == "complete"
