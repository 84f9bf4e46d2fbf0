"""What came late at one rank and was taken in, from the records of its ops.

Owns in which order a packet came, trimmed and then again, and what an op took in that another one had before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tailcut.ledger.fates import Cut, Fates, Runs
from tailcut.ledger.runs import cut_runs
from tailcut.mirror import Stage
from tailcut.replay.granules import in_order, overlap, without

GRANULE_BYTES = 8
"""Of each granule in a plane: a bit of each coordinate."""

Parts = tuple[Runs, Mapping[int, int]]
"""Granules of a contribution or of a mean, and by first granule of a trimmed packet the bytes that came."""


@dataclass(frozen=True)
class LateParts:
    """What an op takes in that was late for another one."""

    seq: int
    stage: Stage
    source: int
    """SCATTER: the rank. GATHER: the shard."""
    subtracted: bool
    """It had been added to an op that nobody applied."""
    runs: Runs
    comings: Sequence[Parts]
    """SCATTER: the same in the order in which it came. A packet may come trimmed, and then again."""


Late = Mapping[int, Sequence[LateParts]]
"""By the op that takes them in."""


def late_parts(records: Iterable[Fates], plays: Callable[[int], bool], planes: bool) -> Late:
    """Of the ops that are played. ``planes``: raw values can be cut anywhere, and came as they are."""
    runs: dict[tuple[int, int, Stage, int, bool], list[tuple[int, int]]] = {}
    cuts: dict[tuple[int, Stage, int], list[Cut]] = {}
    for fates in records:
        for cut in fates.cuts:
            cuts.setdefault((cut.seq, cut.stage, cut.source), []).append(cut)
        for use in fates.uses:
            if plays(use.user) and plays(use.seq):
                place = (use.user, use.seq, use.stage, use.source, use.subtracted)
                runs.setdefault(place, []).append((use.first, use.last))
    for of_packets in cuts.values():
        of_packets.sort(key=lambda cut: cut.late)  # one that was in time came before, wherever it stands
    late: dict[int, list[LateParts]] = {}
    for (user, seq, stage, source, subtracted), of_use in sorted(runs.items()):
        used = in_order(of_use)
        comings = _comings(used, cuts.get((seq, stage, source), []) if planes else [])
        late.setdefault(user, []).append(LateParts(seq, stage, source, subtracted, used, comings))
    return late


def _comings(runs: Runs, cuts: Sequence[Cut]) -> list[Parts]:
    """What was used of packets that came trimmed, by how often they had come before, and then of whole ones.
    What an earlier coming has delivered is not taken from a later one."""
    delivered: list[list[tuple[int, int]]] = []
    bytes_came: list[dict[int, int]] = []
    times_came: dict[int, int] = {}  # by first granule of a packet
    for cut in cuts:
        for first, last in cut_runs(cut):
            time = times_came.get(first, 0)
            times_came[first] = time + 1
            if time == len(delivered):
                delivered.append([])
                bytes_came.append({})
            delivered[time].append((first, min(last, first + cut.payload_bytes // GRANULE_BYTES)))
            bytes_came[time][first] = cut.payload_bytes
    comings: list[Parts] = []
    for of_time, sizes in zip(delivered, bytes_came, strict=True):
        came = in_order(of_time)
        comings.append((overlap(runs, came), sizes))
        runs = without(runs, came)
    return [*comings, (runs, {})]


class Skips:
    """How skipped ops show in what others took in: what a skipped one had taken in is carried again, and what
    was late for it is taken back."""

    def __init__(self, late: Late, voided: Collection[int]) -> None:
        self.first_uses: dict[int, set[int]] = {}
        """By op: those of which it took late contributions in that none before it had taken in."""
        self.before: dict[int, frozenset[int]] = {}
        """By op: those that its owner knew to be skipped when it closed."""
        users: dict[tuple[int, int], list[tuple[int, Runs]]] = {}
        for user in sorted(late):
            scatter = [parts for parts in late[user] if parts.stage == "scatter"]
            known = {parts.seq for parts in scatter if parts.subtracted}
            for parts in scatter:
                if parts.subtracted:
                    continue
                earlier = users.setdefault((parts.seq, parts.source), [])
                same = [other for other, runs in earlier if overlap(runs, parts.runs)]
                known.update(same[-1:])
                if not same:
                    self.first_uses.setdefault(user, set()).add(parts.seq)
                earlier.append((user, parts.runs))
            self.before[user] = frozenset(known.difference(voided))
