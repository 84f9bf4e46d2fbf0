"""How many ranks may send to this one at once.

A switch port that many senders fill at the same moment overflows, and all of them lose packets together; a
sender alone that loses is a bad link, which fewer senders do not mend.
"""

from __future__ import annotations

MOST_ON_THE_WIRE = 255

LOSS_HIGH = 0.05
"""Above it fewer may send. In benchmarks/incast.py without a limit the rank that loses most loses 5 to 7.5 %
over 8 ops, where fewer senders help; with 16 planes it is 2 to 5 %, where they harm."""

LOSS_LOW = 0.01
"""Below it one more may send."""

TRIAL_OPS = 8
"""Over so many a number is judged. Paths need an op or two to find the rates for a new one, and as the least
of all ranks' numbers counts, one rank's bad luck in a few ops must not look like a port that overflows."""

FIRST_REST, REST = 2, 16
"""Trials until it may fall: the first ones, in which paths find their rates, and after a limit that did not
help. With 16 planes instead of raw, benchmarks/incast.py loses 2 % without a limit and 7 % with 12 senders at
once: turns of 8 packets are too short for any pace."""

FEWEST = 4
FEWEST_SHARE = 0.4
"""Of the senders, and so many at least: with fewer, a path must find a rate several times higher in the few
packets of a turn. In docs/time.md, P99 is higher with 8 of 31 than with 16; with 1, deadlines end ops."""


class Incast:
    """The number that this rank advertises.

    Starts without a limit, where OptiReduce starts low: pacing keeps many senders within what most ports
    hold, and few at once are slower there (9 ranks, 2 MB, 200 Mbit/s, ports of 150 kB: 163 ms with 8 at once,
    230 ms with 4). A fall is faster than a rise: every new number costs an op or two at the wrong rates.
    """

    def __init__(self, ranks: int) -> None:
        self._no_limit = max(1, min(ranks - 1, MOST_ON_THE_WIRE + 1))
        self._fewest = min(self._no_limit, max(FEWEST, int(FEWEST_SHARE * self._no_limit)))
        self.senders = self._no_limit
        self._losses: list[float] = []  # since it was last judged
        self._before: float | None = None  # the loss that made it fall, until it was mended
        self._rest = FIRST_REST  # trials

    @property
    def advertised(self) -> int:
        """As the wire has it: 0 is no limit."""
        return 0 if self.senders == self._no_limit else self.senders

    def after(self, loss: float) -> None:
        """``loss`` of an op, of what was on the way to this rank, as far as several senders share it."""
        self._losses.append(loss)
        if len(self._losses) < TRIAL_OPS:
            return
        mean = sum(self._losses) / TRIAL_OPS
        self._losses = []
        self._rest = max(0, self._rest - 1)
        if mean <= LOSS_HIGH:
            self._before = None
            self.senders += mean < LOSS_LOW and self.senders < self._no_limit
        elif self._before is not None and mean >= self._before:
            self.senders, self._rest, self._before = self._no_limit, REST, None
        elif self._rest == 0:
            self._before = self._before or mean
            self.senders = max(self._fewest, self.senders // 2)
