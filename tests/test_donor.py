"""Copies of a training state: how a donor makes them, how they come together, and what a wrong one can do."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tailcut import _native
from tailcut.engine.state import FetchStatus
from tailcut.errors import ConfigError, PeerError
from tailcut.pytorch.donor import COPY_STEPS, KEPT_S, Donor, Request
from tailcut.pytorch.image import PART_BYTES, Head, check, head_of, load, parts_of, read_head
from tailcut.pytorch.resync import Replica, tensors_of
from tailcut.pytorch.transfer import ASK_AGAIN_S, Outcome, Transfer

LIMIT_S = 5.0
SEQS = (40,)


class Fetch:
    """What a rank has asked for. It has an answer when the server lives."""

    def __init__(self, servers: Servers, server: int, blob_id: int) -> None:
        self._servers, self.server, self._blob_id = servers, server, blob_id
        self.blob = np.empty(0, np.uint8)
        self._status = FetchStatus.PENDING

    def poll(self, timeout_ns: int = 0) -> FetchStatus:
        if self._status is FetchStatus.PENDING and self.server not in self._servers.dead:
            found = self._servers.offers[self.server].get(self._blob_id)
            self._status = FetchStatus.ABSENT if found is None else FetchStatus.COMPLETE
            self.blob = self.blob if found is None else found
        return self._status


class Servers:
    """Stands for the STATE of all ranks."""

    def __init__(self, ranks: int) -> None:
        self.offers: list[dict[int, Any]] = [{} for _ in range(ranks)]
        self.wanted: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.dead: set[int] = set()

    def of(self, rank: int) -> Any:
        def withdraw(blob_id: int) -> None:
            self.offers[rank].pop(blob_id, None)

        def offer(blob_id: int, blob: Any) -> None:
            self.offers[rank][blob_id] = blob.copy()

        def take_wanted() -> dict[int, int]:
            wanted, self.wanted[rank] = self.wanted[rank], {}
            return wanted

        def fetch(server: int, blob_id: int, most_bytes: int) -> Fetch:
            if blob_id not in self.offers[server]:
                self.wanted[server][rank] = blob_id
            return Fetch(self, server, blob_id)

        return SimpleNamespace(offer=offer, withdraw=withdraw, take_wanted=take_wanted, fetch=fetch)


def replica(seed: int, width: int = 600) -> Replica:
    """A trained one, with a state for every parameter and more than one part."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3)
    )
    first = layers.get_parameter("0.weight")
    first.data = first.data.t()  # not in the order of memory
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3 * (1 + seed))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    for _ in range(1 + seed):
        layers(torch.randn(8, width)).sum().backward()
        optimizer.step()
    return Replica(cast(Any, SimpleNamespace(module=layers)), optimizer, scaler)


def state_of(one: Replica) -> tuple[bytes, Any, Any]:
    groups = [
        {name: value for name, value in g.items() if name != "params"} for g in one.optimizer.param_groups
    ]
    values = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors_of(one))
    return values, groups, one.scaler.state_dict()


def image_of(one: Replica) -> np.ndarray:
    return np.concatenate([part.copy() for part in parts_of(one)])


# ---- the image


def test_a_loaded_state_is_that_of_the_donor_bit_for_bit() -> None:
    donor, other = replica(2), replica(5)
    assert state_of(donor) != state_of(other)
    head = read_head(head_of(donor, 8, SEQS))
    image = image_of(donor)
    assert (head.step, head.seqs, head.image_bytes) == (8, SEQS, len(image))
    check(head, other, lanes=1)
    load(other, head, image)
    assert state_of(donor) == state_of(other)


def test_a_rank_that_has_not_stepped_yet_gets_the_whole_optimizer_state() -> None:
    donor, other = replica(2), replica(5)
    other.optimizer.state.clear()
    head = read_head(head_of(donor, 8, SEQS))
    check(head, other, lanes=1)
    load(other, head, image_of(donor))
    assert state_of(donor) == state_of(other)


def test_values_that_are_not_plain_stay_as_they_are_on_the_rank() -> None:
    donor, other = replica(2), replica(5)
    donor.optimizer.param_groups[0]["hook"], other.optimizer.param_groups[0]["hook"] = print, repr
    donor.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    load(other, read_head(head_of(donor, 8, SEQS)), image_of(donor))
    assert other.optimizer.param_groups[0]["hook"] is repr
    assert other.optimizer.param_groups[0]["lr"] == 0.25


def test_a_head_runs_no_code() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it ran",))

    file = io.BytesIO()
    torch.save({"step": Evil()}, file)
    for blob in (file.getvalue(), b"", b"nonsense"):
        with pytest.raises(PeerError, match="cannot be read"):
            read_head(np.frombuffer(blob, np.uint8))


def test_a_head_of_another_form_is_refused_before_anything_changes() -> None:
    one = replica(2)
    before = state_of(one)
    good = read_head(head_of(one, 8, SEQS))
    heads = [
        good._replace(seqs=(1, 2)),
        good._replace(model=good.model[1:]),
        good._replace(image_bytes=good.image_bytes + 16),
        good._replace(optimizer=None),
        good._replace(scaler=None),
        read_head(head_of(replica(2, width=301), 8, SEQS)),
    ]
    for head in heads:
        with pytest.raises(ConfigError, match="another form"):
            check(head, one, lanes=1)
    assert state_of(one) == before


# ---- donors


def test_a_donor_copies_at_the_next_agreed_step_and_until_it_hears_that_it_is_done() -> None:
    servers, one, request = Servers(2), replica(1), Request(1, 3)
    donor, asking = Donor(servers.of(0)), servers.of(1)
    asking.fetch(0, request.head, 1)
    for step in range(COPY_STEPS + 1, 2 * COPY_STEPS):
        donor.begin_pass(one, step, SEQS, 0.0)
        assert not servers.offers[0]
    donor.begin_pass(one, 2 * COPY_STEPS, SEQS, 0.0)
    head = read_head(servers.offers[0][request.head])
    assert (head.step, head.seqs, len(servers.offers[0])) == (2 * COPY_STEPS, SEQS, head.parts + 1)
    asking.fetch(0, request.done, 0)
    donor.begin_pass(one, 2 * COPY_STEPS + 1, SEQS, 0.0)
    assert not servers.offers[0]
    asking.fetch(0, request.head, 1)  # a packet that was late
    donor.begin_pass(one, 3 * COPY_STEPS, SEQS, 0.0)
    assert not servers.offers[0]


def test_a_donor_keeps_one_copy_for_a_rank_and_none_for_ever() -> None:
    servers, one = Servers(2), replica(1)
    donor, asking = Donor(servers.of(0)), servers.of(1)
    for attempt in range(3):
        asking.fetch(0, Request(1, attempt).head, 1)
        donor.begin_pass(one, COPY_STEPS, SEQS, 0.0)
        assert {blob_id >> 20 for blob_id in servers.offers[0]} == {Request(1, attempt).head >> 20}
    donor.begin_pass(one, 1, SEQS, KEPT_S + 1)
    assert not servers.offers[0]


def test_a_wish_that_is_heard_again_while_its_copy_is_made_does_not_take_the_copy_away() -> None:
    servers, one, request = Servers(2), replica(1), Request(1, 3)
    state, asking = servers.of(0), servers.of(1)
    offer = state.offer
    state.offer = lambda *blob: (asking.fetch(0, request.head, 1), offer(*blob))[1]  # it is not there yet
    donor = Donor(state)
    asking.fetch(0, request.head, 1)
    donor.begin_pass(one, COPY_STEPS, SEQS, 0.0)
    copied = dict(servers.offers[0])
    donor.begin_pass(one, 2 * COPY_STEPS, SEQS, 0.0)
    assert read_head(servers.offers[0][request.head]).step == COPY_STEPS
    assert servers.offers[0] == copied


@pytest.mark.parametrize("blob_id", [Request(0, 1).head, Request(1, 1).part(5), (1 << 64) - 1])
def test_wishes_in_the_name_of_others_and_made_up_ones_cost_no_copy(blob_id: int) -> None:
    servers = Servers(2)
    servers.of(1).fetch(0, blob_id, 1)
    Donor(servers.of(0)).begin_pass(replica(1), COPY_STEPS, SEQS, 0.0)
    assert not servers.offers[0]


# ---- a transfer


class Rejoining:
    """Rank 0 rejoins, and the others are donors with the same state."""

    def __init__(self, ranks: int, head_limit_s: float = LIMIT_S) -> None:
        self.servers = Servers(ranks)
        self.state = replica(2)
        self.donors = {rank: Donor(self.servers.of(rank)) for rank in range(1, ranks)}
        self.accepted: list[Head] = []
        self.now_s = 0.0
        self.transfer = Transfer(
            *(self.servers.of(0), Request(0, 1), self.donors, self.accept),
            *(head_limit_s, LIMIT_S, self.now_s),
        )

    def accept(self, head: Head) -> bool:
        self.accepted.append(head)
        return head.step >= COPY_STEPS

    def copy(self, *ranks: int, step: int = COPY_STEPS) -> None:
        for rank in ranks:
            self.donors[rank].begin_pass(self.state, step, SEQS, self.now_s)

    def advance(self, seconds: float = 2 * ASK_AGAIN_S) -> Outcome:
        self.now_s += seconds
        return self.transfer.advance(self.now_s)

    def finish(self) -> Outcome:
        for _ in range(1000):
            if (outcome := self.advance()) is not Outcome.UNDER_WAY:
                return outcome
        raise AssertionError("it does not end")


def test_several_donors_share_the_work() -> None:
    rejoining = Rejoining(4)
    assert rejoining.advance() is Outcome.UNDER_WAY
    rejoining.copy(1, 2, 3)
    assert rejoining.finish() is Outcome.COMPLETE
    assert np.array_equal(rejoining.transfer.image, image_of(rejoining.state))
    assert set(rejoining.transfer.brought.values()) == {1, 2, 3}
    assert [head.step for head in rejoining.accepted] == [COPY_STEPS]


def test_a_donor_of_another_step_is_not_mixed_in() -> None:
    rejoining = Rejoining(3)
    rejoining.copy(1)
    rejoining.copy(2, step=2 * COPY_STEPS)
    assert rejoining.finish() is Outcome.COMPLETE
    assert len(set(rejoining.transfer.brought.values())) == 1
    assert len(rejoining.accepted) == 1


def test_a_donor_that_is_behind_is_passed_over() -> None:
    rejoining = Rejoining(3)
    rejoining.copy(1, step=0)
    rejoining.advance()
    assert rejoining.transfer.head is None
    rejoining.copy(2)
    assert rejoining.finish() is Outcome.COMPLETE
    assert set(rejoining.transfer.brought.values()) == {2}


@pytest.mark.parametrize("withdraws", [False, True])
def test_what_a_lost_donor_does_not_bring_is_asked_of_another(withdraws: bool) -> None:
    rejoining = Rejoining(3)
    rejoining.copy(1, 2)
    while not rejoining.transfer._coming:
        rejoining.advance()
    if withdraws:
        rejoining.servers.offers[1].clear()
    else:
        rejoining.servers.dead.add(1)
    assert rejoining.finish() is Outcome.COMPLETE
    assert np.array_equal(rejoining.transfer.image, image_of(rejoining.state))
    assert set(rejoining.transfer.brought.values()) == {2}


def test_without_any_donor_left_it_stalls_or_is_alone_by_the_limit() -> None:
    gone = Rejoining(2)
    gone.copy(1)
    while not gone.transfer._coming:
        gone.advance()
    gone.servers.offers[1].clear()
    assert gone.finish() is Outcome.STALLED
    dead = Rejoining(3)
    dead.servers.dead.update((1, 2))
    assert dead.finish() is Outcome.ALONE
    assert LIMIT_S < dead.now_s < LIMIT_S + 1
    still = Rejoining(3)
    for behind_ops in (1, 2):  # they answer, and take no more steps
        assert still.transfer.advance(0.9 * LIMIT_S * behind_ops, behind_ops) is Outcome.UNDER_WAY
    assert still.transfer.advance(2.9 * LIMIT_S, 2) is Outcome.STALLED
    assert still.transfer.head is None


def test_once_a_copy_has_begun_it_has_the_time_that_it_takes() -> None:
    """Who could do without a copy does not wait long for one, but a part of it takes as long as the path."""
    late = Rejoining(2, head_limit_s=0.5)
    assert late.finish() is Outcome.STALLED  # the donor answers, and does not copy
    assert 0.5 < late.now_s < 1.5
    slow = Rejoining(2, head_limit_s=0.5)
    slow.copy(1)
    while not slow.transfer._coming:
        slow.advance()
    slow.servers.dead.add(1)
    assert slow.advance(0.9 * LIMIT_S) is Outcome.UNDER_WAY
    slow.servers.dead.remove(1)
    assert slow.finish() is Outcome.COMPLETE


def test_a_part_of_a_wrong_length_dismisses_its_donor() -> None:
    rejoining = Rejoining(3)
    rejoining.copy(1, 2)
    for part in range(2):
        rejoining.servers.offers[1][Request(0, 1).part(part)] = np.zeros(PART_BYTES - 1, np.uint8)
    assert rejoining.finish() is Outcome.COMPLETE
    assert np.array_equal(rejoining.transfer.image, image_of(rejoining.state))


def test_ids_of_a_rejoin_do_not_meet() -> None:
    ids = {
        blob_id
        for rank in (0, 1, 65_535)
        for attempt in (1, 2, 4095)
        for blob_id in (
            Request(rank, attempt).head,
            Request(rank, attempt).done,
            Request(rank, attempt).part(0),
        )
    }
    assert len(ids) == 27
    assert min(ids) >= _native.REJOIN_IDS
    assert max(ids) < 1 << 64
