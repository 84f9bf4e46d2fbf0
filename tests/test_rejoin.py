"""A rank that is further behind than the window: it takes the state of the others and goes on with them."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tailcut.engine.state import FetchStatus
from tailcut.errors import PeerError
from tailcut.ledger.writer import NoLedger
from tailcut.pytorch.donor import COPY_STEPS, Donor
from tailcut.pytorch.rejoin import ATTEMPTS, Rejoin
from tests.groups import allreduce, open_groups, vectors
from tests.launch import Worker, workers
from tests.test_donor import SEQS, Servers, replica, state_of

SETTINGS = {"deadline_s": 0.5, "window_ops": 16}


def attached(group: list[Worker]) -> None:
    assert [worker.hear() for worker in group] == ["attached"] * len(group)


def tell(word: str, *group: Worker) -> list[dict[str, Any]]:
    for worker in group:
        worker.say(word)
    return [worker.hear() for worker in group]


def train_without(frozen: Worker, others: list[Worker]) -> None:
    """Let the others go on without it, for more ops than the window has, on each of two lanes."""
    frozen.signal(signal.SIGSTOP)
    for _ in range(40):
        tell("step", *others)
    frozen.signal(signal.SIGCONT)


def train_until(one: Worker, others: list[Worker], word: str) -> dict[str, Any]:
    """Let all go on until one says this."""
    with ThreadPoolExecutor(1) as pool:
        while True:
            heard = pool.submit(tell, "step", one)
            while not heard.done():
                tell("step", *others)
            (said,) = heard.result()
            if said.get(word):
                return said
            assert "error" not in said, said["error"]


def steps_with(rejoined: Worker, *others: Worker) -> None:
    """Nothing is copied any more but means: after each step it is where the others were after that step, with
    their counts and their scale. It may be some steps behind them at first."""
    steps: list[list[dict[str, Any]]] = []
    common: list[tuple[dict[str, Any], dict[str, Any]]] = []
    while len(common) < 4:
        assert len(steps) < 40
        steps.append(tell("step", rejoined, *others))
        there = {one["step"]: one for _, one, *_ in steps}
        common = [(own, there[own["step"]]) for own, *_ in steps if own["step"] in there]
    for own, one in common:
        assert (own["counts"], own["scale"]) == (one["counts"], one["scale"])
        apart = np.abs(np.subtract(own["some"], one["some"])).max()
        assert apart < 0.05 * np.abs(one["some"]).max()


@pytest.mark.parametrize("lanes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_frozen_beyond_the_window_rejoins_and_is_equal_after_a_resync(
    tmp_path: Path, lanes: int
) -> None:
    with workers(tmp_path, 3, "rejoining", json.dumps({**SETTINGS, "lanes": lanes})) as group:
        attached(group)
        one, frozen, two = group
        for _ in range(4):
            tell("step", *group)
        train_without(frozen, [one, two])
        said = train_until(frozen, [one, two], "rejoins")
        assert said["contributing"]  # after one rejoin, or two if the others were a window ahead again
        assert said["rejoined_bytes"] > 3 * 4 * 33_000  # of AdamW
        steps_with(frozen, one, two)
        digests = {result["digest"] for result in tell("resync", *group)}
        assert len(digests) == 1
        tell("step", *group)
        tell("end", *group)
        for worker in group:
            code, err = worker.end()
            assert code == 0, err
            assert ("goes on at step" in err) == (worker is frozen)


def test_a_rank_within_the_window_takes_the_state_if_it_is_far_less_than_the_means_missed(
    tmp_path: Path,
) -> None:
    settings = json.dumps({**SETTINGS, "window_ops": 1024, "many_bytes": 0})
    with workers(tmp_path, 3, "rejoining", settings) as group:
        attached(group)
        one, frozen, two = group
        for _ in range(4):
            tell("step", *group)
        train_without(frozen, [one, two])
        said = train_until(frozen, [one, two], "rejoins")
        assert said["contributing"]
        steps_with(frozen, one, two)
        assert len({result["digest"] for result in tell("resync", *group)}) == 1


def test_a_dead_rank_is_no_donor_and_holds_up_nobody(tmp_path: Path) -> None:
    with workers(tmp_path, 3, "rejoining", json.dumps(SETTINGS)) as (one, frozen, dead):
        attached([one, frozen, dead])
        for _ in range(4):
            tell("step", one, frozen, dead)
        dead.signal(signal.SIGKILL)
        train_without(frozen, [one])
        assert train_until(frozen, [one], "rejoins")["rejoined_bytes"] > 0
        steps_with(frozen, one)


def test_with_rejoin_off_it_gets_one_clear_error(tmp_path: Path) -> None:
    settings = json.dumps({**SETTINGS, "rejoin": False})
    with workers(tmp_path, 2, "rejoining", settings) as (one, frozen):
        attached([one, frozen])
        for _ in range(4):
            tell("step", one, frozen)
        train_without(frozen, [one])
        error = train_until(frozen, [one], "error")["error"]
        assert error.count("BehindError") == 1
        assert "rejoin=True" in error


def test_after_a_resync_a_rank_that_stayed_behind_is_with_the_others(tmp_path: Path) -> None:
    """They wait for it there and take no steps, so that it finds no donor."""
    with workers(tmp_path, 3, "rejoining", json.dumps(SETTINGS)) as group:
        attached(group)
        one, frozen, two = group
        for _ in range(4):
            tell("step", *group)
        train_without(frozen, [one, two])
        while tell("step", frozen)[0]["contributing"]:
            pass
        for _ in range(3):
            assert not tell("step", frozen)[0]["contributing"]
        results = tell("resync", *group)
        assert len({result["digest"] for result in results}) == 1
        for _ in range(3):
            results = tell("step", *group)
        assert len({str(result["counts"]) for result in results}) == 1
        assert [result["rejoins"] for result in results] == [0, 0, 0]
        assert all(result["contributing"] for result in results)


# ---- without processes


def test_an_op_is_never_entered_as_another_than_the_caller_means(tmp_path: Path) -> None:
    with open_groups(tmp_path, 2) as groups:
        for group in groups:
            group._ops.in_order = True
        assert [report.seq for report in allreduce(groups, vectors(2, 1000))] == [0, 0]
        for group in groups:
            group._ops.lanes[0].skip_to(5)  # as if the group had gone on
        arrays = vectors(2, 1000)
        assert [report.status for report in allreduce(groups, arrays)] == ["behind"] * 2
        assert not np.any(arrays)
        for group in groups:
            assert group._ops.seqs == (2,)
            assert not group._ops.can_skip_to((4,))
            assert group._ops.can_skip_to((7,))
            group._ops.skip_to((7,))
        reports = allreduce(groups, vectors(2, 1000))
        assert [(report.seq, report.status) for report in reports] == [(7, "complete")] * 2


@pytest.mark.filterwarnings("ignore:tailcut")  # a rank is silent, and comes back
def test_skipped_ops_take_no_room_and_their_means_are_not_sent(tmp_path: Path) -> None:
    """A program hangs, and its engine keeps means until half of its pool is full. An epoch begins without it.
    Then it goes on from a later op, because it fetches a state, and takes the means since."""
    length, missed, since = 100_000, 90, 36
    with open_groups(tmp_path, 3, codec="raw", pool_bytes=32 << 20, deadline_s=20.0) as groups:
        present, hung = groups[:2], groups[2]
        allreduce(groups, vectors(3, length), key="bucket")
        hung._ops.set_away(True)
        for _ in range(missed):
            allreduce(present, vectors(2, length), key="bucket")
        (lane,) = hung._ops.lanes
        assert lane.stats().pool_used_bytes > 12 << 20
        hung._ops.skip_to(present[0]._ops.seqs)
        skipped_at = hung.stats()
        assert hung._ops.state is not None
        assert hung._ops.state.fetch(0, 7, 0).poll(10**10) is FetchStatus.ABSENT  # as it fetches a state
        assert lane.stats().pool_used_bytes < 8 << 20  # means of its own shard
        hung._ops.settle_epochs(10.0)
        means = [vectors(2, length, seed=op) for op in range(since)]
        for arrays in means:
            allreduce(present, arrays, key="bucket")
        while hung.behind_ops < since:
            pass
        for arrays in means:
            array = np.zeros(length, np.float32)
            report = hung.allreduce(array, "bucket", contribute=False).wait()
            assert (report.status, report.epoch) == ("complete", 1)
            assert array.tobytes() == arrays[0].tobytes()
        stats = hung.stats()
        for reason in ("pool", "epoch"):  # since it skipped
            assert stats.rejected[reason] == skipped_at.rejected[reason]
        came_bytes = stats.traffic.received_bytes - skipped_at.traffic.received_bytes
        assert came_bytes < 1.2 * since * 4 * length


class Alone:
    """Rank 0 of three rejoins. What the others do happens while it waits."""

    def __init__(self, deadline_s: float = 0.02) -> None:
        self.servers = Servers(3)
        self.own, self.others = replica(1), replica(2)
        self.skipped: list[tuple[int, ...]] = []
        self.contributes = False
        self.ops = SimpleNamespace(
            lanes=[None],
            behind_ops=0,
            seqs=SEQS,
            can_skip_to=lambda seqs: True,
            skip_to=self.skipped.append,
            hear_epochs=lambda: None,
            rejoined=lambda: setattr(self, "contributes", True),
            ledger=NoLedger(),
        )
        group = SimpleNamespace(
            _ops=self.ops, rank=0, world_size=3, config=SimpleNamespace(deadline_s=deadline_s)
        )
        state = self.servers.of(0)
        fetch = state.fetch
        state.fetch = lambda *asked: (self.happen(), fetch(*asked))[1]
        self.rejoin = Rejoin(cast(Any, group), state)

    def happen(self) -> None:
        """Nothing."""


class WithDonors(Alone):
    def __init__(self, deadline_s: float = 5.0, vanishing: bool = False) -> None:
        self.donors: dict[int, Donor] = {}
        super().__init__(deadline_s)
        self.donors = {rank: Donor(self.servers.of(rank)) for rank in (1, 2)}
        self.vanishing = vanishing
        self.step = 0

    def happen(self) -> None:
        self.step += 1
        for rank, donor in self.donors.items():
            donor.begin_pass(self.others, self.step, SEQS, 0.0)
            if self.vanishing:  # a head without its parts
                heads = {key: blob for key, blob in self.servers.offers[rank].items() if key % (1 << 20) == 0}
                self.servers.offers[rank] = heads


def test_it_has_the_state_of_the_donors_and_their_step() -> None:
    rank = WithDonors()
    step = rank.rejoin.run(rank.own, "is behind")
    assert step is not None
    assert (step + 1) % COPY_STEPS == 0
    assert state_of(rank.own) == state_of(rank.others)
    assert (rank.skipped, rank.contributes, rank.rejoin.rejoins) == ([SEQS], True, 1)
    rank.happen()
    assert not any(rank.servers.offers)  # it has said that it is done


def test_if_donors_vanish_every_time_it_says_so_and_ends() -> None:
    rank = WithDonors(vanishing=True)
    before = state_of(rank.own)
    with pytest.raises(PeerError, match=f"in {ATTEMPTS} attempts"):
        rank.rejoin.run(rank.own, "is behind")
    assert len(rank.skipped) == ATTEMPTS
    assert (state_of(rank.own), rank.contributes) == (before, False)


def test_if_nobody_answers_it_says_so_and_ends() -> None:
    rank = Alone()
    rank.servers.dead.update((1, 2))
    with pytest.raises(PeerError, match="of ranks 1, 2 nobody has answered"):
        rank.rejoin.run(rank.own, "is behind")


def test_if_there_is_another_way_it_is_no_error_that_nobody_answers() -> None:
    rank = Alone(deadline_s=100.0)
    rank.servers.dead.update((1, 2))
    before = state_of(rank.own)
    assert rank.rejoin.run(rank.own, "is behind", within_s=0.02) is None
    assert (state_of(rank.own), rank.skipped) == (before, [])


def test_if_the_others_stand_still_it_asks_again_only_when_they_move() -> None:
    rank = Alone()
    assert rank.rejoin.run(rank.own, "is behind") is None
    asked = rank.rejoin._attempts
    assert rank.rejoin.run(rank.own, "is behind") is None
    assert rank.rejoin._attempts == asked
    rank.ops.behind_ops = 1
    assert rank.rejoin.run(rank.own, "is behind") is None
    assert rank.rejoin._attempts == asked + 1
