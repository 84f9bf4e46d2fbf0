"""How many ranks may send to this one at once.

A switch port that many senders fill at the same moment overflows, and all of them lose packets together. If a
single sender loses, its link is bad, and fewer senders do not help.
"""

from __future__ import annotations

MOST_ON_THE_WIRE = 255

LOSS_HIGH = 0.05
"""Above this loss fewer may send. In benchmarks/incast.py without a limit, the rank that loses most loses 5
to 7.5 % over 8 ops where fewer senders help. With 16 planes it loses 2 to 5 %, and there they harm."""

LOSS_LOW = 0.01
"""Below this loss one more may send."""

TRIAL_OPS = 8
"""A number is judged over this many ops. Paths need an op or two to find the rates for a new number. As the
least of all ranks' numbers counts, one rank's bad luck in a few ops must not look like a port that
overflows."""

FIRST_REST, REST = 2, 16
"""Trials until the number may fall: at first, while paths find their rates, and after a limit that did not
help. With 16 planes instead of raw, benchmarks/incast.py loses 2 % without a limit and 7 % with 12 senders at
once: turns of 8 packets are too short for any pace."""

FEWEST = 4
FEWEST_SHARE = 0.4
"""The number falls to no less than this share of the senders, and no less than ``FEWEST``. With fewer, a path
would have to find a rate several times higher within the few packets of a turn. In docs/time.md, P99 is
higher with 8 of 31 than with 16; with 1, deadlines end ops."""


class Incast:
    """The number that this rank advertises.

    It starts without a limit, where OptiReduce starts low: pacing keeps many senders within what most ports
    hold, and few at once are slower there (9 ranks, 2 MB, 200 Mbit/s, ports of 150 kB: 163 ms with 8 at once,
    230 ms with 4). It falls faster than it rises, because every new number costs an op or two at the wrong
    rates.
    """

    def __init__(self, ranks: int) -> None:
        self._no_limit = max(1, min(ranks - 1, MOST_ON_THE_WIRE + 1))
        self._fewest = min(self._no_limit, max(FEWEST, int(FEWEST_SHARE * self._no_limit)))
        self.senders = self._no_limit
        self._losses: list[float] = []  # since the number was last judged
        self._before: float | None = None  # the loss that made it fall; None once that has been remedied
        self._rest = FIRST_REST  # trials until it may fall

    @property
    def advertised(self) -> int:
        """The number on the wire, where 0 means no limit."""
        return 0 if self.senders == self._no_limit else self.senders

    def after(self, loss: float) -> None:
        """Learn from an op. ``loss`` is the share lost on the way to this rank, as far as several senders
        share it."""
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
