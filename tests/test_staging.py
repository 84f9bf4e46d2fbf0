"""Tensors on their way to host memory and back, on a device that runs its copies as late as it may."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tailcut import ConfigError
from tailcut.pytorch import reducer as reducer_module
from tailcut.pytorch.reducer import Reducer
from tailcut.pytorch.staging import DevicePassage, Passage, passage_of
from tests.groups import open_groups


class Event:
    """What was queued before it has happened when ``synchronize`` returns, and not earlier."""

    def __init__(self, stream: Stream, position: int) -> None:
        self._stream = stream
        self._position = position

    def synchronize(self) -> None:
        assert self._stream.may_run.wait(60)
        self._stream.run_until(self._position)


class Stream:
    """A queue in the order of submission. Nothing in it runs by itself."""

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.may_run.set()
        self._lock = threading.Lock()
        self._queued: list[Callable[[], object]] = []
        self._ran = 0

    def give(self, action: Callable[[], object]) -> Event:
        with self._lock:
            self._queued.append(action)
            return Event(self, len(self._queued))

    def run_until(self, position: int) -> None:
        with self._lock:
            while self._ran < position:
                self._queued[self._ran]()
                self._ran += 1  # not after an error: a device that is lost stays lost

    def latest(self) -> Event:
        return Event(self, len(self._queued))


class Device:
    """``Streams`` without an accelerator: its memory is the host's, its order is that of one stream."""

    def __init__(self) -> None:
        self.stream = Stream()
        self._current = threading.local()
        self._tensors: set[int] = set()

    def tensor(self, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One whose values are computed by what is still in the queue."""
        tensor = torch.full((len(values),), torch.nan, dtype=dtype)
        self.stream.give(lambda: tensor.copy_(torch.tensor(values)))
        self._tensors.add(id(tensor))
        return tensor

    def passage_of(self, tensor: torch.Tensor) -> Passage:
        return DevicePassage(tensor, self) if id(tensor) in self._tensors else passage_of(tensor)

    def is_current(self) -> bool:
        return getattr(self._current, "inside", False)

    def pinned(self, shape: torch.Size) -> torch.Tensor:
        return torch.full(shape, torch.nan)

    def copy_out(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        return self.stream.give(lambda: host.copy_(source))

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._current.inside = True
        try:
            yield
        finally:
            self._current.inside = False

    def copy_in(self, host: torch.Tensor, target: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        self.stream.give(lambda: target.copy_(host))
        return self._inside()


class Broken(Device):
    def copy_out(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        def fail() -> None:
            raise RuntimeError("the device is lost")

        return self.stream.give(fail)


@contextlib.contextmanager
def reducers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *devices: Device, deadline_s: float = 60.0
) -> Iterator[list[Reducer]]:
    """One reducer for each device, all in this process."""

    def way(tensor: torch.Tensor) -> Passage:
        for device in devices:
            if id(tensor) in device._tensors:
                return device.passage_of(tensor)
        return passage_of(tensor)

    monkeypatch.setattr(reducer_module, "passage_of", way)
    with open_groups(directory, len(devices), deadline_s=deadline_s) as groups:
        opened = [Reducer(group) for group in groups]
        try:
            yield opened
        finally:
            for device in devices:
                device.stream.may_run.set()
            threads = [threading.Thread(target=reducer.close) for reducer in opened]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


def test_a_device_tensor_is_read_after_it_was_computed_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Device(), Device()
    tensors = devices[0].tensor(1, 2, 3), devices[1].tensor(3, 6, 9)
    with reducers(tmp_path, monkeypatch, *devices) as opened:
        reductions = [reducer.average(t) for reducer, t in zip(opened, tensors, strict=True)]
        for device, reduction in zip(devices, reductions, strict=True):
            result = reduction.future.wait()
            device.stream.latest().synchronize()
            assert result.tolist() == [2, 4, 6]


def test_a_device_tensor_holds_the_mean_in_the_order_of_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    tensor = device.tensor(5, 6)
    seen: list[tuple[bool, list[float]]] = []

    def consume(future: torch.futures.Future[torch.Tensor]) -> None:
        # As torch does for a future of a device: an event on the stream that is current at completion.
        device.stream.latest().synchronize()
        seen.append((device.is_current(), future.value().tolist()))

    with reducers(tmp_path, monkeypatch, device) as (reducer,):
        device.stream.may_run.clear()  # so that the continuation is there before the end
        reduction = reducer.average(tensor)
        consumed = reduction.future.then(consume)
        device.stream.give(lambda: tensor.fill_(torch.nan))  # what follows must not see it before the copy-in
        device.stream.may_run.set()
        consumed.wait()
    assert seen == [(True, [5, 6])]


def test_a_host_tensor_does_not_overtake_one_that_is_still_being_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = Device(), Device()
    with reducers(tmp_path, monkeypatch, slow, fast) as opened:
        slow.stream.may_run.clear()
        on_device = [opened[0].average(slow.tensor(2, 4)), opened[1].average(fast.tensor(4, 8))]
        on_host = [opened[rank].average(torch.full((7,), float(rank))) for rank in range(2)]
        assert not on_host[0].future.done()
        slow.stream.may_run.set()
        assert [r.future.wait().tolist() for r in on_host] == [[0.5] * 7] * 2
        for device, reduction in zip((slow, fast), on_device, strict=True):
            reduction.future.wait()
            device.stream.latest().synchronize()
            assert reduction.tensor.tolist() == [3, 6]
        after = [reducer.average(torch.ones(3)) for reducer in opened]
        assert [r.future.wait().tolist() for r in after] == [[1.0] * 3] * 2


def test_futures_complete_in_the_order_of_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    order: list[int] = []

    def note(number: int, _: torch.futures.Future[torch.Tensor]) -> None:
        order.append(number)

    with reducers(tmp_path, monkeypatch, device) as (reducer,):
        device.stream.may_run.clear()
        tensors = [device.tensor(0), torch.ones(1), device.tensor(2), torch.ones(1)]
        ends = [
            reducer.average(tensor).future.then(partial(note, number))
            for number, tensor in enumerate(tensors)
        ]
        device.stream.may_run.set()
        for end in ends:
            end.wait()
    assert order == [0, 1, 2, 3]


def test_a_copy_that_fails_is_told_in_its_future_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Broken()
    with reducers(tmp_path, monkeypatch, device) as (reducer,):
        with pytest.raises(RuntimeError, match="the device is lost"):
            reducer.average(device.tensor(1)).future.wait()
        assert reducer.average(torch.ones(2)).future.wait().tolist() == [1, 1]


def test_after_close_nothing_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    with reducers(tmp_path, monkeypatch, device) as (reducer,):
        reducer.close()
        for tensor in (torch.ones(1), device.tensor(1)):
            future = reducer.average(tensor).future
            assert future.done()
            with pytest.raises(RuntimeError, match="ClosedError: the group is closed"):
                future.wait()


def test_a_bucket_that_nobody_waited_for_is_settled_before_its_next_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error in one bucket DDP does not wait for the others, and the user may go on."""
    with reducers(tmp_path, monkeypatch, Device(), Device()) as (one, other):
        first, second = torch.tensor([1.0]), torch.tensor([3.0])
        with ThreadPoolExecutor(1) as pool:
            early = one.average(first, key="bucket").future
            late = pool.submit(one.average, second, key="bucket")
            for value in (3.0, 5.0):
                other.average(torch.tensor([value]), key="bucket").future.wait()
            late.result().future.wait()
        early.wait()
        assert (first.item(), second.item()) == (2.0, 4.0)


def test_what_is_in_flight_at_close_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    with reducers(tmp_path, monkeypatch, device, Device()) as (reducer, _):
        futures = [reducer.average(tensor).future for tensor in (torch.ones(1), device.tensor(1))]
        reducer.close(linger_s=0.0)
        for future in futures:
            with pytest.raises(RuntimeError, match="ClosedError"):
                future.wait()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_rounded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    inputs = [torch.tensor(np.random.default_rng(rank).standard_normal(500)).to(dtype) for rank in range(3)]
    expected = (sum(x.float() for x in inputs) * torch.tensor(1 / 3)).to(dtype)
    with reducers(tmp_path, monkeypatch, Device(), Device(), Device()) as opened:
        reductions = [reducer.average(x.clone()) for reducer, x in zip(opened, inputs, strict=True)]
        for reduction in reductions:
            # The division may be off by the last bit of float32, which rounding hides but at a tie.
            torch.testing.assert_close(
                reduction.future.wait(), expected, rtol=torch.finfo(dtype).eps, atol=0.0
            )


def test_a_strided_tensor_is_averaged_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    with reducers(tmp_path, monkeypatch, Device(), Device()) as (one, other):
        ours = one.average(whole.t()[::2])
        theirs = other.average(torch.zeros(2, 3))
        assert ours.future.wait().tolist() == [[0, 2, 4], [1, 3, 5]]
        assert theirs.future.wait().tolist() == [[0, 2, 4], [1, 3, 5]]
    assert whole.tolist() == [[0, 1, 1, 3], [2, 5, 3, 7], [4, 9, 5, 11]]


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1, dtype=torch.float64), torch.ones(2, 2).to_sparse(), torch.ones(1, device="meta")],
    ids=["float64", "sparse", "meta"],
)
def test_what_cannot_be_averaged_is_refused_in_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor
) -> None:
    with pytest.raises(ConfigError):
        passage_of(tensor)
    with reducers(tmp_path, monkeypatch, Device()) as (reducer,):
        future = reducer.average(tensor).future
        with pytest.raises(RuntimeError, match="ConfigError: tailcut averages"):
            future.wait()


@pytest.mark.parametrize(
    ("ops", "seen_after", "said"),
    [(0, None, False), (2, None, True), (2, 1, True), (2, 2, False)],
    ids=["no op", "never seen", "seen before the last op", "seen after the last op"],
)
def test_the_end_is_summed_up_unless_the_user_has_seen_the_last_totals(
    tmp_path: Path, ops: int, seen_after: int | None, said: bool
) -> None:
    farewells: list[bool] = []
    with open_groups(tmp_path, 1) as (group,):
        reducer = Reducer(group, farewell=lambda: farewells.append(True))
        for op in range(1, ops + 1):
            reducer.average(torch.ones(3)).future.wait()
            if op == seen_after:
                assert reducer.stats().ops == op
        reducer.close()
        reducer.close()
    assert farewells == [True] * said
