"""The agreement on epochs as a pure state machine: votes, quorums, who decides what and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tailcut import Report
from tailcut.grid import GridLayout
from tailcut.mirror import Link, LinkStage, StageReport
from tailcut.policy.epoch_values import Epoch, Pace
from tailcut.policy.epochs import (
    AHEAD_LOOKS,
    AHEAD_OPS,
    PATIENCE_S,
    RETURNED_OPS,
    SETTLED_OPS,
    SILENT_OPS,
    UNHURRIED_OPS,
    WORTHWHILE,
    Agreement,
    Step,
)
from tailcut.policy.ports import HEALED, HEAVIEST, LEAST, OPS, REVIEW_OPS, SLOW

OP_S = 0.01


class Play:
    """Ranks that end ops in step and share a store."""

    def __init__(self, ranks: int) -> None:
        self.agreements = [Agreement(rank, GridLayout(ranks)) for rank in range(ranks)]
        self.store: dict[str, bytes] = {}
        self.seq = 0
        self.installed: list[tuple[int, Epoch]] = []
        self.look_s: dict[int, float] = {}  # by rank: how long its looks into the store take

    def op(
        self, alive: Sequence[int], silent: Sequence[int] = (), left: Sequence[int] = (), look: bool = True
    ) -> None:
        """One op of these ranks, in which they hear nothing of others."""
        ranks = range(len(self.agreements))
        links = tuple(link(rank in silent, rank in left) for rank in ranks)
        for rank in alive:
            agreement = self.agreements[rank]
            heard = max(self.agreements[other].epoch.number for other in alive)
            report = Report(self.seq, "complete", 100, OP_S, links=links, heard_epoch=heard)
            agreement.after(report, OP_S * self.seq, self.seq + 1)
            while look and self.look(rank):
                pass
        self.seq += 1

    def ops(self, count: int, *args: Sequence[int], **more: Sequence[int]) -> None:
        for _ in range(count):
            self.op(*args, **more)

    def look(self, rank: int) -> bool:
        agreement = self.agreements[rank]
        look_at_s = agreement.look_at_s()
        if look_at_s is None or look_at_s > OP_S * self.seq:
            return False
        content = {key: self.store.get(key) for key in agreement.wanted()}
        step = agreement.step(OP_S * self.seq, content, self.look_s.get(rank, 0.0))
        self.store.update({key: vote.encode() for key, vote in step.votes.items()})
        if step.proposal:
            self.store.setdefault(step.proposal[0], step.proposal[1].encode())
        self.installed += [(rank, epoch) for epoch in step.epochs]
        return bool(step.proposal or step.epochs)


def link(silent: bool, left: bool = False) -> Link:
    missing = 10 if silent or left else 0
    return Link(None if missing else 0.0, silent, scatter=LinkStage(10, missing), left=left)


def epochs(play: Play) -> list[tuple[int, ...]]:
    return sorted({(epoch.number, *epoch.members) for _, epoch in play.installed})


def test_nobody_is_suspected_before_k_silent_ops() -> None:
    play = Play(3)
    play.ops(SILENT_OPS - 1, [0, 1], [2])
    assert play.agreements[0].look_at_s() is None
    assert not play.store
    play.op([0, 1], [2])
    assert play.store


def test_the_living_follow_one_epoch_that_begins_ahead_of_all() -> None:
    play = Play(4)
    play.ops(SILENT_OPS + 2, [0, 1, 3], [2])
    assert [rank for rank, _ in play.installed] == [3, 0, 1]  # the last voter decides
    (epoch,) = {epoch for _, epoch in play.installed}
    assert (epoch.number, epoch.members, epoch.weights) == (1, (0, 1, 3), (1, 1, 0, 1))
    # 40 ms are four ops here.
    assert epoch.first_seqs == (SILENT_OPS + AHEAD_OPS,)
    assert Epoch.parse(epoch.text().encode()) == epoch


def test_an_epoch_begins_as_far_ahead_as_the_slowest_voter_needs_to_read_of_it() -> None:
    """Over a network that loses packets, the store may take as long as many ops."""
    play = Play(4)
    play.look_s[1] = 0.05
    play.ops(40, [0, 1, 2, 3])
    play.ops(SILENT_OPS + 2, [0, 1, 3], [2])
    (epoch,) = {epoch for _, epoch in play.installed}
    looks = AHEAD_LOOKS * round(play.look_s[1] / OP_S)
    assert epoch.first_seqs == (40 + SILENT_OPS + AHEAD_OPS + looks,)


def test_a_short_silence_takes_its_vote_back() -> None:
    play = Play(4)
    play.ops(SILENT_OPS, [0], [2])
    play.ops(3, [0, 1, 2, 3])
    assert play.agreements[0].look_at_s() is None
    play.ops(SILENT_OPS - 1, [1, 3], [2])  # the old vote of rank 0 must not count
    play.op([1, 3], [2], look=False)
    assert play.look(1) is False
    assert not play.installed


@pytest.mark.parametrize(
    ("ranks", "alive", "formed"),
    [
        (2, [0], True),
        (2, [1], False),
        (3, [1, 2], True),
        (3, [0], False),
        (4, [0, 3], True),
        (4, [1, 2], False),
        (4, [1, 2, 3], True),
        (5, [3, 4], False),
        (8, [0, 1, 2], False),
    ],
)
def test_who_may_decide(ranks: int, alive: list[int], formed: bool) -> None:
    play = Play(ranks)
    gone = [rank for rank in range(ranks) if rank not in alive]
    play.ops(SILENT_OPS + 3, alive, gone)
    assert epochs(play) == ([(1, *alive)] if formed else [])


def test_two_sides_of_a_partition_never_both_decide() -> None:
    for ranks in range(2, 7):
        for sides in range(1, 2**ranks - 1):
            play = Play(ranks)
            one = [rank for rank in range(ranks) if sides >> rank & 1]
            other = [rank for rank in range(ranks) if rank not in one]
            for _ in range(SILENT_OPS + 3):
                play.op(one, other)
                play.op(other, one)
            (epoch,) = epochs(play)
            assert list(epoch[1:]) in (one, other)


def test_a_minority_says_so_once() -> None:
    play = Play(5)
    play.ops(int(4 * PATIENCE_S / OP_S), [3, 4], [0, 1, 2])
    assert not play.installed
    (alarm,) = play.agreements[3].take_alarms()
    assert "does not hear ranks 0, 1, 2" in alarm
    play.ops(100, [3, 4], [0, 1, 2])
    assert not play.agreements[3].take_alarms()


def test_a_majority_waits_for_all_who_stay_but_not_for_ever() -> None:
    play = Play(5)
    for _ in range(SILENT_OPS + 5):  # rank 3 hears everybody
        play.op([0, 1, 2], [4])
        play.op([3])
    assert not play.installed
    play.ops(int(PATIENCE_S / OP_S) + 5, [0, 1, 2], [4])
    assert epochs(play) == [(1, 0, 1, 2, 3)]


def test_who_has_left_is_out_at_once_and_takes_no_side() -> None:
    play = Play(2)
    play.ops(2, [1], left=[0])
    assert epochs(play) == [(1, 1)]


def test_deaths_one_after_the_other_make_one_epoch_each() -> None:
    play = Play(4)
    play.ops(SILENT_OPS + 2, [0, 1, 2], [3])
    play.ops(SILENT_OPS + 2, [0, 1], [2, 3])
    assert epochs(play) == [(1, 0, 1, 2), (2, 0, 1)]
    first, second = sorted({epoch.first_seqs for _, epoch in play.installed})
    assert first < second


def test_a_second_death_during_the_vote_changes_the_votes() -> None:
    play = Play(5)
    play.ops(SILENT_OPS - 3, [0, 1, 2, 3], [4])
    play.ops(SILENT_OPS + 3, [0, 1, 2], [3, 4])
    assert epochs(play)[-1][1:] == (0, 1, 2)


def test_who_comes_back_contributes_on_time_before_it_owns_again() -> None:
    play = Play(3)
    play.ops(SILENT_OPS + 2, [0, 1], [2])
    play.ops(RETURNED_OPS - 1, [0, 1, 2])
    assert epochs(play) == [(1, 0, 1)]
    assert play.agreements[2].epoch.number == 1  # it has heard of it, and does not vote
    play.ops(3, [0, 1, 2])
    assert epochs(play) == [(1, 0, 1), (2, 0, 1, 2)]
    assert [a.epoch.weights for a in play.agreements] == [(1, 1, 1)] * 3


def test_who_was_left_behind_is_warned_and_the_lowest_tells() -> None:
    play = Play(3)
    play.ops(SILENT_OPS + 2, [1, 2], [0])
    play.op([0, 1, 2])
    (alarm,) = play.agreements[0].take_alarms()
    assert "go on without it" in alarm
    (news,) = play.agreements[1].take_news()
    assert news == f"epoch 1 from op {SILENT_OPS + AHEAD_OPS} on: rank 0 (dead) owns nothing"
    assert not play.agreements[2].take_news()


def test_a_burst_of_ops_is_more_ahead() -> None:
    pace = Pace()
    for step in range(10):
        for op in range(20):
            pace.note(step + 1e-4 * op, 20 * step + op)
    assert pace.most_within(0.01) == 19


def test_nothing_to_do_is_nothing_to_write() -> None:
    agreement = Agreement(0, GridLayout(3))
    assert agreement.step(0.0, {}) == Step()


# ---- slow ports --------------------------------------------------------------------------------------------


class PortsPlay(Play):
    """Ranks with ports of some speeds, as all see them or only some. Ops become ``gain`` times faster in an
    epoch for a port."""

    def __init__(self, speeds: Sequence[float], gain: float = 1.5, grid: GridLayout | None = None) -> None:
        super().__init__(len(speeds))
        if grid:
            self.agreements = [Agreement(rank, grid) for rank in range(len(speeds))]
        self.speeds = list(speeds)
        self.gain = gain
        self.seers: Sequence[int] = range(len(speeds))
        self.dead: set[int] = set()

    def run(self, ops: int) -> None:
        for _ in range(ops):
            for rank in range(len(self.speeds)):
                if rank not in self.dead:
                    self.report(rank)
            self.seq += 1

    def report(self, rank: int) -> None:
        agreement = self.agreements[rank]
        living = [a for other, a in enumerate(self.agreements) if other not in self.dead]
        faster = self.gain if min(agreement.epoch.speeds) < 1 else 1.0
        report = Report(
            self.seq,
            "complete",
            100,
            OP_S / faster,
            epoch=max(
                (e.number for r, e in self.installed if r == rank and e.first_seqs[0] <= self.seq), default=0
            ),
            heard_epoch=max(a.epoch.number for a in living),
            scatter=StageReport(began_s=0.0, ended_s=OP_S),
            links=tuple(self.link(rank, other) for other in range(len(self.speeds))),
        )
        agreement.after(report, OP_S * self.seq, self.seq + 1)
        while self.look(rank):
            pass

    def link(self, rank: int, other: int) -> Link:
        if other in self.dead:
            return link(True)
        took_s = OP_S / (self.speeds[other] if rank in self.seers else 1.0)
        return Link(
            0.0,
            scatter=LinkStage(25, last_s=took_s),
            gather=LinkStage(25),
            delivered_bytes=50,
            in_flight_s=took_s,
        )

    def weights(self) -> list[tuple[int, ...]]:
        """In the order of epochs."""
        return [epoch.weights for epoch in sorted({e for _, e in self.installed}, key=lambda e: e.number)]


LEAST_WEIGHTS = (HEAVIEST, HEAVIEST, HEAVIEST, LEAST)


def test_a_slow_port_owns_less_when_ops_have_settled() -> None:
    play = PortsPlay([1, 1, 1, 0.5])
    play.run(SETTLED_OPS - 1)
    assert not play.store
    play.run(int(PATIENCE_S / OP_S))
    assert play.weights() == [LEAST_WEIGHTS]
    assert sorted(rank for rank, _ in play.installed) == [0, 1, 2, 3]  # itself too, which has not voted
    (epoch,) = {epoch for _, epoch in play.installed}
    assert epoch.members == (0, 1, 2, 3)
    assert epoch.first_seqs[0] >= SETTLED_OPS + UNHURRIED_OPS
    assert Epoch.parse(epoch.text().encode()) == epoch
    (news,) = play.agreements[0].take_news()
    assert news.endswith("rank 3 (port 0.5 of the others') owns 0.082 of a share")


@pytest.mark.parametrize(("speed", "formed"), [(SLOW + 0.01, False), (SLOW - 0.01, True)])
def test_how_slow_a_port_must_be(speed: float, formed: bool) -> None:
    play = PortsPlay([1, 1, 1, 1, speed])
    play.run(2 * SETTLED_OPS)
    assert bool(play.installed) == formed


@pytest.mark.parametrize(("seers", "formed"), [([0], False), ([0, 1], True), ([1, 2], True), ([1], False)])
def test_most_others_must_see_it(seers: list[int], formed: bool) -> None:
    """Otherwise it is a path and no port. At N = 4, three others see a rank."""
    play = PortsPlay([1, 1, 1, 0.5])
    play.seers = seers
    play.run(3 * SETTLED_OPS)
    assert bool(play.installed) == formed


def test_few_ranks_and_grids_stay_as_they_are() -> None:
    for play in (
        PortsPlay([1, 0.2]),
        PortsPlay([1, 1, 0.2]),
        PortsPlay([1, 1, 1, 0.2], grid=GridLayout(4, 2)),
    ):
        if len(play.speeds) < 4:
            play.run(3 * SETTLED_OPS)
        assert not play.store
        assert all(agreement._ports is None for agreement in play.agreements)


def test_a_port_that_has_healed_owns_its_share_again() -> None:
    play = PortsPlay([1, 1, 1, 0.5])
    play.run(2 * SETTLED_OPS)
    play.speeds[3] = HEALED - 0.01
    play.run(5 * SETTLED_OPS)
    assert play.weights() == [LEAST_WEIGHTS]
    play.speeds[3] = HEALED + 0.01
    play.run(SETTLED_OPS + OPS + REVIEW_OPS)
    assert play.weights() == [LEAST_WEIGHTS, (1, 1, 1, 1)]
    assert play.agreements[0].take_news()[-1].endswith("rank 3 owns its share again")


@pytest.mark.parametrize(("gain", "kept"), [(WORTHWHILE + 0.01, True), (WORTHWHILE - 0.01, False)])
def test_a_change_that_makes_ops_no_faster_is_taken_back(gain: float, kept: bool) -> None:
    play = PortsPlay([1, 1, 1, 0.5], gain)
    play.run(6 * SETTLED_OPS)
    assert play.weights() == ([LEAST_WEIGHTS] if kept else [LEAST_WEIGHTS, (1, 1, 1, 1)])


def test_ports_that_come_and_go_make_fewer_and_fewer_epochs() -> None:
    play = PortsPlay([1, 1, 1, 0.5], gain=1.0)
    for k in range(40):
        play.speeds[3] = 0.5 if k % 2 else 1.0
        play.run(SETTLED_OPS)
    assert 2 <= len(play.weights()) <= 6


def test_a_death_while_a_port_is_slow() -> None:
    play = PortsPlay([1, 1, 1, 1, 0.5])
    play.run(2 * SETTLED_OPS)
    play.dead = {1}
    play.run(SILENT_OPS + 5)
    assert play.weights()[-1] == (HEAVIEST, 0, HEAVIEST, HEAVIEST, LEAST)


def test_a_slow_port_that_few_see_does_not_delay_a_death() -> None:
    play = PortsPlay([1, 1, 1, 1, 0.5])
    play.seers = [0]
    play.run(2 * SETTLED_OPS)
    assert play.store
    assert not play.installed
    play.dead = {1}
    play.run(SILENT_OPS + 2)
    assert play.weights() == [(1, 0, 1, 1, 1)]
