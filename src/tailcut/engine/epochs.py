"""The thread that talks to the store about epochs, off the critical path (policy/epochs.py decides).

It begins when there is first something to agree on. A store that blocks holds up nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from tailcut import _native, notices
from tailcut.ledger.writer import NoLedger
from tailcut.policy.epochs import Agreement, Step
from tailcut.report import Report
from tailcut.store import ComparingStore, try_get

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Until a store that has failed is asked again."""

_ANSWER_S = 5.0
"""A store that takes longer does not answer."""


class EpochKeeper:
    """Keeps one rank's epochs, and tells its lanes. ``prefix`` keeps the keys of groups apart."""

    def __init__(
        self,
        agreement: Agreement,
        store: ComparingStore,
        prefix: str,
        lanes: Sequence[_native.UdpLane],
        ledger: NoLedger,
    ) -> None:
        self._agreement = agreement
        self._store = store
        self._prefix = prefix
        self._lanes = lanes
        self._ledger = ledger
        self._weights = [agreement.epoch.weights]  # by epoch
        self._changed = threading.Condition()  # guards what follows, and the agreement
        self._thread: threading.Thread | None = None
        self._closed = False
        self._in_force = 0  # the latest epoch that the lanes were told of
        self._asked_at: float | None = None
        self._failure = ""
        self._told_failure = False

    def weights_of(self, epoch: int) -> Sequence[int]:
        """How much each rank owns in an epoch that an op has been in."""
        return self._weights[epoch]

    def after(self, report: Report, now_s: float, entered: int, lane: int) -> None:
        """An op has ended. Costs some microseconds."""
        with self._changed:
            self._agreement.after(report, now_s, entered, lane)
            if self._asked_at is not None and time.monotonic() - self._asked_at > _ANSWER_S:
                self._failure = f"no answer in {_ANSWER_S:g} s"
            self._look_if_due()

    def hear(self, number: int) -> None:
        """Somebody has spoken of this epoch. Reports tell it too, but a rank that is behind ends no ops."""
        with self._changed:
            if number > self._agreement.heard:
                self._agreement.hear(number)
                self._look_if_due()

    def _look_if_due(self) -> None:
        if self._closed or self._agreement.look_at_s() is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tailcut-epochs", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def settle(self, limit_s: float) -> None:
        """Wait until the epochs that this rank has heard of are in force here, but not for a store that does
        not answer. For ranks that are behind: in ops of an epoch that they do not know they get nothing."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._failure or self._agreement.heard <= self._in_force, limit_s
            )

    def take_alarms(self) -> list[str]:
        with self._changed:
            alarms = self._agreement.take_alarms()
            if self._failure and not self._told_failure:
                self._told_failure = True
                alarms.append(
                    f"tailcut: the store does not answer ({self._failure}): training goes on, and the shares "
                    "of ranks that have died stay lost. Host the store where it outlives a rank"
                )
        return alarms

    def close(self) -> None:
        """The thread ends after the call to the store that it is in."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread, but not for a store that does not answer. If the interpreter ended while the
        thread is in a call, the store's locks would stay taken, and the process might never end."""
        if self._thread is not None:
            self._thread.join(_ANSWER_S)

    def _run(self) -> None:
        while (keys := self._wait()) is not None:
            try:
                self._ask(keys)
            except Exception as error:  # stores raise what they like
                with self._changed:
                    self._failure = str(error) or type(error).__name__
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed, _RETRY_S)
            finally:
                self._asked_at = None

    def _wait(self) -> list[str] | None:
        """Until it is time to look into the store. None: the group has closed."""
        with self._changed:
            while not self._closed:
                look_at_s = self._agreement.look_at_s()
                left_s = None if look_at_s is None else look_at_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._asked_at = time.monotonic()
                    return self._agreement.wanted()
                self._changed.wait(left_s)
        return None

    def _ask(self, keys: list[str]) -> None:
        began_s = time.monotonic()
        content = {key: try_get(self._store, self._prefix + key) for key in keys}
        with self._changed:
            now_s = time.monotonic()
            step = self._agreement.step(now_s, content, now_s - began_s)
            news = self._agreement.take_news()
            self._failure = ""
        self._do(step)
        for text in news:
            notices.say(_log, f"tailcut: {text}")

    def _do(self, step: Step) -> None:
        for epoch in step.epochs:
            self._weights.append(epoch.weights)
            self._ledger.note("epoch", **vars(epoch))
            for lane, first_seq in zip(self._lanes, epoch.first_seqs, strict=True):
                lane.install(_native.Epoch(epoch.number, first_seq, epoch.weights, epoch.members))
            with self._changed:
                self._in_force = epoch.number
                self._changed.notify_all()
        for key, vote in step.votes.items():
            self._store.set(self._prefix + key, vote.encode())
        if step.proposal:
            key, proposal = step.proposal
            self._store.compare_set(self._prefix + key, "", proposal)
