"""How many ranks may send to this one at once.

A switch port that many senders fill at the same moment overflows, and all of them lose packets together; a
sender alone that loses is a bad link, which fewer senders do not mend.
"""

from __future__ import annotations

from tailcut.policy.early_exit import LOSS_LOW

MOST_ON_THE_WIRE = 255

LOSS_HIGH = 0.02
"""Above it fewer may send. Links that lose a percent at random are common, and fewer senders do not mend
them; ports that overflow under many senders lose more at once."""


class Incast:
    """The number that this rank advertises.

    Starts without a limit, where OptiReduce starts low: credit and pacing keep first packets within what
    receivers hold, a limit costs time at once (a sender may wait for one that is computing), and a fall is
    faster than a rise: one op against many.
    """

    def __init__(self, ranks: int) -> None:
        self._no_limit = max(1, min(ranks - 1, MOST_ON_THE_WIRE + 1))
        self.senders = self._no_limit

    @property
    def advertised(self) -> int:
        """As the wire has it: 0 is no limit."""
        return 0 if self.senders == self._no_limit else self.senders

    def after(self, loss: float) -> None:
        """``loss`` of packets to this rank in an op, as far as several senders share it. What was only late
        says nothing: senders find their pace by delay."""
        if loss > LOSS_HIGH:
            self.senders = max(1, self.senders // 2)
        elif loss < LOSS_LOW:
            self.senders = min(self._no_limit, self.senders + 1)
