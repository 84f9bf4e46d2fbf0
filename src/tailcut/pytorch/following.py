"""Keeps a rank with its group: before a forward pass it takes what the others have done without it.

Means as long as they are kept, else the state of the others. Owns the order of the two and when to give up.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from tailcut.errors import BehindError
from tailcut.pytorch.catch_up import CatchUp
from tailcut.pytorch.passes import Passes
from tailcut.pytorch.reducer import Reducer
from tailcut.pytorch.rejoin import Rejoin
from tailcut.pytorch.replayed import ReplayedRejoin
from tailcut.pytorch.resync import Replica, tensors_of

REJOINS_IN_A_ROW = 3
"""A group may be beyond the window again before its state has come."""

MANY_BYTES = 1 << 26
"""Fewer bytes of means come in a fraction of a second, and the others notice nothing of it."""

LESS = 1 / 4
"""A state is fetched instead of means if it has less than this share of their bytes: the others must copy it,
and the means since the copy come on top."""

COPY_LIMIT_S = 3.0
"""How long to wait for a copy of the state where the means would do. Donors copy at one step of several, and
so many means take as long."""


class Following:
    """One rank. ``restart`` is called when its replica was given the state of another. ``may_choose``:
    it may take a state where the means would do, because a step changes nothing else, and no ledger has to
    tell a replay which way it was."""

    def __init__(
        self,
        reducer: Reducer,
        passes: Passes,
        catch_up: CatchUp | None,
        rejoin: Rejoin | ReplayedRejoin | None,
        replica: Callable[[], Replica],
        restart: Callable[[], None],
        warn: Callable[[str], None],
        *,
        may_choose: bool,
    ) -> None:
        self._reducer = reducer
        self._passes = passes
        self._catch_up = catch_up
        self._rejoin = rejoin
        self._replica = replica
        self._restart = restart
        self._warn = warn
        self._may_choose = may_choose
        reducer.rejoins = rejoin is not None

    def before_forward(self, ddp: DistributedDataParallel) -> None:
        if self._rejoin is not None:
            self._rejoin.raise_failure()
        for _ in range(REJOINS_IN_A_ROW):
            if self._is_with_group(ddp):
                return
        raise BehindError(
            f"the state of the others was fetched {REJOINS_IN_A_ROW} times, and each time they were beyond "
            "the window again before it had come; raise window_ops and pool_bytes"
        )

    def _is_with_group(self, ddp: DistributedDataParallel) -> bool:
        """Take what there is. Returns whether the forward pass may begin."""
        if self._reducer.behind is not None and not (ddp.training and self._rejoined()):
            return True  # it goes on alone
        catch_up = self._catch_up
        if catch_up is None or not catch_up.due(ddp):
            return True
        if self._state_is_less(catch_up.missed_bytes) and self._took_state(catch_up):
            return False
        if catch_up.catch_up():
            return True
        if self._rejoin is None:
            self._stay_behind(catch_up)
            return True
        jumped = catch_up.jumped
        self._reducer.behind = f"is {jumped.behind_ops} ops behind" if jumped else "lacks means that are gone"
        if jumped is not None or self._rejoined():
            return False
        self._reducer.behind = None  # it is still at the same ops as the others
        self._stay_behind(catch_up)
        return True

    def _state_is_less(self, missed_bytes: int) -> bool:
        """Whether the state of the others is far less than the means that this rank has missed."""
        if self._rejoin is None or not self._may_choose or missed_bytes < MANY_BYTES:
            return False
        return sum(tensor.nbytes for tensor in tensors_of(self._replica())) < LESS * missed_bytes

    def _took_state(self, catch_up: CatchUp) -> bool:
        self._reducer.behind = f"is {catch_up.missed_steps} steps behind, whose means are more than a state"
        rejoined = self._rejoined(within_s=COPY_LIMIT_S)
        self._reducer.behind = None
        return rejoined

    def _rejoined(self, within_s: float | None = None) -> bool:
        """Fetch the state of the others; False if they have none to go on from."""
        assert self._rejoin is not None
        assert self._reducer.behind is not None
        step = self._rejoin.run(self._replica(), self._reducer.behind, within_s=within_s)
        if step is None:
            return False
        self._passes.skip_to(step)
        self._restart()
        self._replica().ddp.zero_grad()
        self._reducer.behind = None
        return True

    def _stay_behind(self, catch_up: CatchUp) -> None:
        if catch_up.jumped is not None:
            raise self._reducer.fall_behind(catch_up.jumped)
        self._warn(
            "tailcut: this rank was behind, and some of the means that it has missed are gone; its replica "
            "differs from the others until attachment.resync()"
        )
