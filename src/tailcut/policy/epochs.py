"""Agreement on epochs: who owns shards from some op on (docs/epochs.md).

The view of one rank, as a pure state machine: it is told of reports and of what the store holds, and returns
what to write there and which epochs to follow. Knows no threads, clocks or stores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from tailcut.grid import GridLayout
from tailcut.policy.epoch_values import Epoch, Pace
from tailcut.policy.ports import Ports, owner_weights, wanted_speeds
from tailcut.report import Report

SILENT_OPS = 8
"""A rank is dead to this one after so many ops in a row in which it was silent. It is silent after two
without a word, so that 10 ops pass, and of the 20 that the change may take 10 are left to agree."""

RETURNED_OPS = 20
"""A rank that is no member is back after it has contributed on time to so many ops in a row."""

AHEAD_OPS = 4
"""An epoch begins at least so many ops after the latest that any voter has entered."""

FARTHER_OPS = 3
"""And so many more in a grid: other rows are told by their columns, and may be ahead of the voters."""

UNHURRIED_OPS = 32
"""And so many more if all ranks live and only ports differ: a rank with a slow port does not vote on itself,
and hears of the epoch from others."""

SETTLED_OPS = 200
"""Nobody votes on ports in so many ops after an epoch has begun, twice as many after each change for a port:
ports that come and go make fewer and fewer epochs."""

WORTHWHILE = 1.05
"""Ops must become faster by this factor when owners change for a port; otherwise the change is taken back. A
short op cannot send means while contributions come, and then an equal share is best for any port."""

PAUSE_S = 0.005
"""Between two looks into the store, at first. The pause grows tenfold while nothing happens, and a
hundredfold if it is only about ports."""

AHEAD_PAUSES, AHEAD_LOOKS = 8, 3
"""An epoch also begins at least as many ops ahead as are entered in so many pauses and so many looks into the
store, as long as the slowest voter's take: the proposal must be there, and all must have read it before. Who
is in such an op when it hears of the epoch has to give the op up."""

PATIENCE_S = 1.0
"""How long the votes of all future members are waited for when a majority has voted."""

_LATEST_NUMBER = 0xFFFF
"""It travels as 16 bits."""

_MEMBERSHIP = 0.0
"""A wish in place of a speed: that the rank becomes a member, or is none any more."""

Wishes = Mapping[int, float]
"""By rank: what a voter wants to change, _MEMBERSHIP or the speed of its port."""


@dataclass(frozen=True)
class Step:
    """What to do after a look into the store, in this order."""

    votes: Mapping[str, str] = field(default_factory=dict)
    """Values to set, by key."""
    proposal: tuple[str, str] | None = None
    """A key and the value that it gets if it has none."""
    epochs: Sequence[Epoch] = ()
    """To be followed from now on."""


class _Said(NamedTuple):
    """A vote on one rank."""

    wish: float
    entered: list[int]
    """How many ops the voter had entered, by lane."""
    look_s: float
    """How long its looks into the store take."""


def _subjects(wishes: Wishes) -> set[tuple[int, bool]]:
    return {(rank, wish == _MEMBERSHIP) for rank, wish in wishes.items()}


class Agreement:
    """One rank's part in it. ``pause_s`` is 0 where the store can be looked into after every op."""

    def __init__(self, rank: int, grid: GridLayout, lanes: int = 1, pause_s: float = PAUSE_S) -> None:
        self.rank = rank
        self._grid = grid
        ranks = grid.ranks
        self.epoch = Epoch(0, (0,) * lanes, tuple(range(ranks)), (1,) * ranks, (1.0,) * ranks)
        self._first_pause_s = pause_s
        self._paces = [Pace() for _ in range(lanes)]
        self._silent_ops = [0] * ranks
        self._on_time_ops = [0] * ranks
        self._members = frozenset(self.epoch.members)
        self._departed: set[int] = set()
        self._gone: set[int] = set()  # dead or departed
        self._returned: set[int] = set()
        self._heard = 0
        # Who sees only two others cannot tell which of them is unusual, and of two ranks a share changes
        # nothing. In a grid shards must be cut alike in all rows.
        self._ports = Ports(ranks, rank) if ranks > 3 and grid.rows == 1 else None
        self._other_speeds: Wishes = {}  # those that this rank sees, where they differ
        self._undo: Wishes = {}  # what held before ports were found slower
        self._port_changes = 0
        self._vote: Wishes = {}
        self._voted_at = 0.0
        self._told_minority = False
        self._look_at = 0.0
        self._look_s = 0.0  # how long looks take: the longest of the latest
        self._pause_s = pause_s
        self._news: list[str] = []
        self._alarms: list[str] = []

    # ---- what this rank sees

    def after(self, report: Report, now_s: float, entered: int, lane: int = 0) -> None:
        """An op has ended. ``entered``: how many this rank has entered on the lane."""
        self._paces[lane].note(now_s, entered)
        self.hear(max([report.heard_epoch, *(op.heard_epoch for op in report.column)]))
        for rank, link in zip(report.members, report.links, strict=True):
            self._silent_ops[rank] = self._silent_ops[rank] + 1 if link.silent else 0
            if link.left:
                self._departed.add(rank)
            if link.left or self._silent_ops[rank] >= SILENT_OPS:
                self._gone.add(rank)
            elif rank not in self._departed:
                self._gone.discard(rank)
            on_time = link.entered_s is not None and not (link.scatter.missing or link.abstained)
            self._on_time_ops[rank] = self._on_time_ops[rank] + 1 if on_time else 0
            if link.silent:
                self._returned.discard(rank)
            elif self._on_time_ops[rank] >= RETURNED_OPS:
                self._returned.add(rank)
        if any(self._vote.get(rank) != _MEMBERSHIP for rank in self._changes):
            self._look_at, self._pause_s = 0.0, self._first_pause_s  # no vote on ports delays one on these
        if self._ports is not None and report.epoch == self.epoch.number and self._ports.after(report):
            useless = self._undo and self._ports.gain < WORTHWHILE
            seen = wanted_speeds(self._ports.speeds, self.epoch.speeds)
            self._other_speeds = self._undo if useless else seen

    def hear(self, number: int) -> None:
        """Somebody has spoken of this epoch."""
        if number > self._heard:
            self._heard, self._look_at = number, 0.0

    @property
    def heard(self) -> int:
        """The number of the latest epoch that anybody has spoken of."""
        return self._heard

    @property
    def _changes(self) -> frozenset[int]:
        """The ranks that should become members, or be none any more, as far as this rank sees."""
        back = self._returned - self._members - self._gone
        return frozenset((self._members & self._gone | back) - {self.rank})

    @property
    def _wishes(self) -> Wishes:
        """What this rank wants to change."""
        wishes = dict.fromkeys(self._changes, _MEMBERSHIP)
        settled_at = self.epoch.first_seqs[0] + (SETTLED_OPS << min(16, self._port_changes))
        if self._other_speeds and self._paces[0].entered >= settled_at:
            members = {rank: wish for rank, wish in self._other_speeds.items() if rank in self._members}
            return members | wishes
        return wishes

    @property
    def _votes(self) -> bool:
        """Only members decide who is one."""
        return self.rank in self._members and self.epoch.number < _LATEST_NUMBER

    def _electorate(self, rank: int) -> set[int]:
        """Who decides on a rank: the members that hear it in every op. Whoever has left takes no side."""
        return {other for other in self._grid.row(rank) if other in self._members} - self._departed

    # ---- the store

    def look_at_s(self) -> float | None:
        """When to look into the store next; None: there is no reason to."""
        voting = self._votes and (self._vote or self._wishes)
        if voting or self._heard > self.epoch.number:
            return self._look_at
        self._look_at, self._pause_s = 0.0, self._first_pause_s
        return None

    def wanted(self) -> list[str]:
        """What to read there."""
        voters = self._electorate(self.rank) if self._votes else ()
        return [self._next_key, *(self._vote_key(rank) for rank in sorted(voters))]

    @property
    def _next_key(self) -> str:
        return f"epoch/{self.epoch.number + 1}"

    def _vote_key(self, rank: int) -> str:
        return f"{self._next_key}/vote/{rank}"

    def step(self, now_s: float, content: Mapping[str, bytes | None], took_s: float = 0.0) -> Step:
        """What follows from the values of ``wanted()``, which took so long to read; None where there is
        none."""
        self._look_s = max(took_s, self._look_s / 2)
        changes, wishes = self._changes, self._wishes
        self._look_at = now_s + self._pause_s
        self._pause_s = min(1.5 * self._pause_s, (10 if changes else 100) * self._first_pause_s)
        if decided := content.get(self._next_key):
            return self._follow(Epoch.parse(decided))
        if not self._votes or not (wishes or self._vote):
            return Step()
        votes = {}
        if _subjects(wishes) != _subjects(self._vote):
            vote = [sorted(wishes.items()), self._entered, self._look_s]
            votes[self._vote_key(self.rank)] = json.dumps(vote)
            self._vote, self._voted_at = wishes, now_s
        said = self._votes_of(self._vote, content)
        agreed = {rank for rank in wishes if self._decided(rank, set(said[rank]))}
        if not agreed:
            self._tell_minority(now_s, changes)
            return Step(votes)
        # All who stay should know before it begins, and who sees more should have its way. Who owns nothing
        # gets no contributions, and cannot tell who is on time.
        blind = {rank for rank in self._electorate(self.rank) if not self.epoch.weights[rank]}
        urgent = changes or wishes.keys()
        missing = any(
            self._electorate(rank) - said[rank].keys() - changes - blind - {rank} for rank in agreed & urgent
        )
        if (missing or urgent - agreed) and now_s - self._voted_at < PATIENCE_S:
            return Step(votes)
        proposal = self._proposal({rank: said[rank] for rank in agreed})
        if not any(proposal.weights):  # a grid with a dead rank at every place
            return Step(votes)
        self._look_at = now_s  # at what was decided
        return Step(votes, (self._next_key, proposal.text()))

    @property
    def _entered(self) -> list[int]:
        return [pace.entered for pace in self._paces]

    def _votes_of(self, wishes: Wishes, content: Mapping[str, bytes | None]) -> dict[int, dict[int, _Said]]:
        """By rank that should change: who says so too."""
        own = (self._entered, self._look_s)
        said = {rank: {self.rank: _Said(wish, *own)} for rank, wish in wishes.items()}
        for voter in self._electorate(self.rank) - {self.rank}:
            if vote := content.get(self._vote_key(voter)):
                theirs, entered, look_s = json.loads(vote)
                for rank, wish in theirs:
                    if rank in wishes and (wish == _MEMBERSHIP) == (wishes[rank] == _MEMBERSHIP):
                        said[rank][voter] = _Said(wish, entered, look_s)
        return said

    def _decided(self, rank: int, voters: set[int]) -> bool:
        """More than half of those who decide, or half with the lowest of them. Nobody sees its own port."""
        electorate = self._electorate(rank) - ({rank} if rank not in self._changes else set())
        half, voters = len(electorate) / 2, voters & electorate
        return len(voters) > half or (len(voters) == half and min(electorate) in voters)

    def _proposal(self, agreed: Mapping[int, Mapping[int, _Said]]) -> Epoch:
        all_said = [said for votes in agreed.values() for said in votes.values()]
        ahead_s = AHEAD_PAUSES * self._first_pause_s + AHEAD_LOOKS * max(said.look_s for said in all_said)
        wishes = {rank: median_low(said.wish for said in votes.values()) for rank, votes in agreed.items()}
        changes = {rank for rank, wish in wishes.items() if wish == _MEMBERSHIP}
        first_seqs = [
            max(before, *(said.entered[lane] for said in all_said))
            + max(AHEAD_OPS, pace.most_within(ahead_s))
            + FARTHER_OPS * (self._grid.rows > 1)
            + UNHURRIED_OPS * (not changes)
            for lane, (pace, before) in enumerate(zip(self._paces, self.epoch.first_seqs, strict=True))
        ]
        members = self._members ^ changes
        speeds = tuple(wishes.get(rank) or speed for rank, speed in enumerate(self.epoch.speeds))
        # Shards are cut alike in all rows of a grid, so that their columns fit.
        owners = [members.issuperset(self._grid.column(rank)) for rank in range(self._grid.ranks)]
        weights = owner_weights([speed * owns for speed, owns in zip(speeds, owners, strict=True)])
        return Epoch(self.epoch.number + 1, tuple(first_seqs), tuple(sorted(members)), weights, speeds)

    def _follow(self, epoch: Epoch) -> Step:
        before, self.epoch = self.epoch, epoch
        self._members = frozenset(epoch.members)
        self._vote, self._told_minority = {}, False
        self._look_at, self._pause_s = 0.0, self._first_pause_s
        if self._ports is not None:
            self._ports.forget()
            self._other_speeds = {}
            self._port_changes += epoch.speeds != before.speeds
            slower = [rank for rank, speed in enumerate(epoch.speeds) if speed < before.speeds[rank]]
            self._undo = {rank: before.speeds[rank] for rank in slower}
        self._tell_epoch(before)
        return Step(epochs=[epoch])

    # ---- what it tells

    def _tell_epoch(self, epoch_before: Epoch) -> None:
        before, members = frozenset(epoch_before.members), self._members
        changes = [
            f"rank {rank} ({'left' if rank in self._departed else 'dead'}) owns nothing"
            for rank in sorted(before - members)
        ] + [f"rank {rank} (back) owns its share again" for rank in sorted(members - before)]
        pairs = zip(epoch_before.speeds, self.epoch.speeds, self.epoch.shares, strict=True)
        for rank, (old, speed, share) in enumerate(pairs):
            if speed != old and rank in members:
                changes.append(
                    f"rank {rank} (port {speed:g} of the others') owns {share:.2g} of a share"
                    if speed < 1
                    else f"rank {rank} owns its share again"
                )
        ops = "/".join(map(str, self.epoch.first_seqs))
        text = f"epoch {self.epoch.number} from op {ops} on: {', '.join(changes)}"
        if self.rank == min(members):
            self._news.append(text)
        elif self.rank in before - members:
            self._alarms.append(
                f"tailcut: rank {self.rank} was silent, and the others go on without it ({text}). "
                "It owns nothing until it has contributed on time again"
            )

    def _tell_minority(self, now_s: float, changes: frozenset[int]) -> None:
        lost = ", ".join(str(rank) for rank in self.epoch.members if rank in changes)
        if self._told_minority or not lost or now_s - self._voted_at < 3 * PATIENCE_S:
            return
        self._told_minority = True
        self._alarms.append(
            f"tailcut: rank {self.rank} does not hear ranks {lost}, and too few ranks say so to agree on "
            "other owners: it goes on, and every op lacks their shares. Is it cut off from the others?"
        )

    def take_news(self) -> list[str]:
        """What one rank should log."""
        news, self._news = self._news, []
        return news

    def take_alarms(self) -> list[str]:
        """What to warn of."""
        alarms, self._alarms = self._alarms, []
        return alarms
