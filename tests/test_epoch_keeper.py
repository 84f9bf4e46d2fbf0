"""The thread that talks to the store about epochs: what it tells the lanes, and what a bad store costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tailcut import FileStore, Report, _native
from tailcut.engine.epochs import EpochKeeper
from tailcut.grid import GridLayout
from tailcut.ledger.writer import NO_LEDGER
from tailcut.policy.epoch_values import Epoch
from tailcut.policy.epochs import Agreement
from tests.groups import open_groups
from tests.test_policy_epochs import link

LIMIT_S = 20.0  # only a hang takes longer


class Lane:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.epochs: list[_native.Epoch] = []
        self.told = threading.Event()

    def install(self, epoch: _native.Epoch) -> None:
        self.epochs.append(epoch)
        self.told.set()


class BadStore(FileStore):
    """Answers nothing: it fails, or it blocks until it is released."""

    def __init__(self, directory: Path, failure: Exception | None = None) -> None:
        super().__init__(directory)
        self.failure = failure
        self.asked, self.released = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        if self.failure:
            raise self.failure
        self.released.wait(LIMIT_S)
        return False


def ops_without(dead: int, keeper: EpochKeeper, count: int = 10) -> None:
    links = tuple(link(rank == dead) for rank in range(2))
    for seq in range(count):
        keeper.after(Report(seq, "partial", 100, 0.01, links=links), 0.01 * seq, seq + 1, 0)


def until(condition: Callable[[], object]) -> None:
    for _ in range(int(LIMIT_S / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("it did not happen")


def keeper_with(store: FileStore, *lanes: Lane) -> EpochKeeper:
    return EpochKeeper(Agreement(0, GridLayout(2), len(lanes)), store, "prefix/", lanes, NO_LEDGER)


def test_all_lanes_are_told_of_an_epoch(tmp_path: Path) -> None:
    lanes = Lane(), Lane()
    keeper = keeper_with(FileStore(tmp_path), *lanes)
    ops_without(1, keeper)
    for lane in lanes:
        assert lane.told.wait(LIMIT_S)
        assert [epoch.number for epoch in lane.epochs] == [1]
    first, second = (epoch.first_seq for lane in lanes for epoch in lane.epochs)
    assert 12 <= first <= 14  # the thread votes after 8, 9 or 10 ops
    assert second == 4
    assert keeper.weights_of(1) == (1, 0)
    keeper.close()


def test_a_rank_that_is_behind_waits_for_the_epochs_that_it_has_heard_of(tmp_path: Path) -> None:
    lane, store = Lane(), FileStore(tmp_path)
    keeper = keeper_with(store, lane)
    keeper.settle(LIMIT_S)  # it has heard of none
    links = (link(False), link(False))
    keeper.after(Report(3, "complete", 100, 0.01, links=links, heard_epoch=1), 0.01, 4, 0)
    threading.Timer(
        0.05, store.set, ["prefix/epoch/1", Epoch(1, (14,), (0,), (1, 0), (1.0, 1.0)).text().encode()]
    ).start()
    keeper.settle(LIMIT_S)
    assert [epoch.number for epoch in lane.epochs] == [1]
    keeper.close()


def test_a_rank_that_is_behind_does_not_wait_for_a_store_that_fails(tmp_path: Path) -> None:
    keeper = keeper_with(BadStore(tmp_path, RuntimeError("broken pipe")), Lane())
    links = (link(False), link(False))
    keeper.after(Report(3, "complete", 100, 0.01, links=links, heard_epoch=1), 0.01, 4, 0)
    keeper.settle(LIMIT_S)
    assert keeper._failure
    keeper.close()


def test_nothing_is_asked_of_the_store_without_a_reason(tmp_path: Path) -> None:
    keeper = keeper_with(FileStore(tmp_path), Lane())
    ops_without(5, keeper, 100)
    assert keeper._thread is None
    assert not list(tmp_path.iterdir())


def test_a_store_that_fails_is_told_of_once(tmp_path: Path) -> None:
    store = BadStore(tmp_path, RuntimeError("broken pipe"))
    keeper = keeper_with(store, Lane())
    ops_without(1, keeper)
    alarms: list[str] = []
    until(lambda: alarms or alarms.extend(keeper.take_alarms()))
    assert "the store does not answer (broken pipe)" in alarms[0]
    ops_without(1, keeper)
    assert not keeper.take_alarms()
    keeper.close()


def test_joining_waits_for_a_store_but_not_for_one_that_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BadStore(tmp_path)
    keeper = keeper_with(store, Lane())
    ops_without(1, keeper)
    assert store.asked.wait(LIMIT_S)
    keeper.close()
    monkeypatch.setattr("tailcut.engine.epochs._ANSWER_S", 0.0)
    keeper.join()
    assert keeper._thread
    assert keeper._thread.is_alive()
    monkeypatch.setattr("tailcut.engine.epochs._ANSWER_S", LIMIT_S)
    store.released.set()
    keeper.join()
    assert not keeper._thread.is_alive()


def test_a_closed_group_has_no_thread_in_the_store(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2) as groups:
        keeper = groups[0]._ops._epochs
        assert keeper
        ops_without(1, keeper)
        assert keeper._thread
    assert not keeper._thread.is_alive()


def test_a_store_that_cannot_compare_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FileStore, "compare_set")
    with open_groups(tmp_path, 2) as groups:
        assert "the store has no compare_set" in groups[0].describe()
        assert groups[0].stats().owner_weights == ()
