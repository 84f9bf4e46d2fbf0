"""STATE: blobs that ranks fetch from each other, behind everything alive. In virtual time, with faults."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tailcut import _native
from tailcut.engine.state import FetchStatus
from tests.groups import allreduce, open_groups, vectors
from tests.rotation import mix

COMPLETE, ABSENT, TOO_LARGE = 1, 2, 3
MS = 1_000_000
S = 1000 * MS
LIMIT_NS = 60 * S
"""Only a hang takes longer."""
STATE = 4
ANSWER, GONE = 1, 2
BLOB = np.random.default_rng(0).bytes(300_000)
REJOIN = _native.REJOIN_IDS


def spec_of(ranks: int = 2, seed: int = 0, **settings: object) -> _native.SimSpec:
    """Ranks that do nothing but what is added to the spec."""
    spec = _native.SimSpec()
    spec.ranks, spec.seed, spec.linger_ns, spec.delay_ns = ranks, seed, 60 * S, 100_000
    spec.ops_by_rank = [0] * ranks
    bounds = _native.Bounds(S, 2 * S, S, 0, 0, 4 * S)
    spec.terms = _native.Terms(bounds, 16)
    for name, value in settings.items():
        setattr(spec, name, value)
    return spec


def with_ops(spec: _native.SimSpec, ops: int, length: int) -> list[list[np.ndarray]]:
    """Let all ranks average ``ops`` buckets without a pause."""
    spec.ops_by_rank = [ops] * spec.ranks
    spec.compute_ns = [[0] * spec.ranks] * ops
    spec.resend = True
    return [[np.full(length, rank, np.float32) for rank in range(spec.ranks)] for _ in range(ops)]


def outcomes(result: _native.SimResult) -> dict[int, tuple[int, bytes]]:
    """By ticket: status and bytes."""
    return {ticket: (status, blob) for _, _, ticket, status, blob in result.fetched}


def packet(spec: _native.SimSpec, **fields: int) -> _native.Header:
    """An answer of rank 0 to the first fetch of its peer, but for these fields."""
    header = _native.Header()
    header.type, header.flags, header.stamp_us, header.seq = STATE, ANSWER, 1, 1
    header.blob_id, header.edition, header.group_tag = 7, 1, mix(spec.seed) % _native.TAGS
    for name, value in fields.items():
        setattr(header, name, value)
    return header


def test_a_blob_comes_whole() -> None:
    spec = spec_of()
    spec.offer(0, 0, 7, BLOB)
    ticket = spec.fetch(MS, 1, 0, 7, len(BLOB))
    result = _native.simulate(spec, [])
    assert outcomes(result) == {ticket: (COMPLETE, BLOB)}
    assert not any(result.counters[0].rejected.values())
    assert not any(result.counters[1].rejected.values())


@pytest.mark.parametrize("size", [0, 1, 1279, 1280, 1281, 2560])
def test_blobs_of_any_length_come(size: int) -> None:
    spec = spec_of()
    spec.offer(0, 0, 7, BLOB[:size])
    ticket = spec.fetch(MS, 1, 0, 7, size)
    assert outcomes(_native.simulate(spec, [])) == {ticket: (COMPLETE, BLOB[:size])}


@pytest.mark.parametrize("seed", range(4))
def test_loss_duplication_and_reordering_cost_time_and_not_a_byte(seed: int) -> None:
    spec = spec_of(3, seed, loss=0.2, duplicate=0.2, jitter_ns=500_000)
    wanted = {}
    for server, blob_id in itertools.product((0, 2), (7, 8)):
        spec.offer(0, server, blob_id, BLOB[blob_id + server :])
        wanted[spec.fetch(MS, 1, server, blob_id, len(BLOB))] = (COMPLETE, BLOB[blob_id + server :])
    result = _native.simulate(spec, [])
    assert outcomes(result) == wanted
    assert result.fates["lost"] > 0


def test_what_is_not_offered_is_absent() -> None:
    spec = spec_of()
    spec.offer(0, 0, 7, BLOB)
    spec.withdraw(MS, 0, 7)
    tickets = [spec.fetch(2 * MS, 1, 0, blob_id, len(BLOB)) for blob_id in (7, 8)]
    assert outcomes(_native.simulate(spec, [])) == dict.fromkeys(tickets, (ABSENT, b""))


def test_a_blob_that_is_replaced_under_way_is_absent_and_never_a_mixture() -> None:
    spec = spec_of()
    spec.offer(0, 0, 7, BLOB)
    ticket = spec.fetch(MS, 1, 0, 7, len(BLOB))
    spec.offer(MS + MS // 2, 0, 7, BLOB[::-1])
    again = spec.fetch(2 * S, 1, 0, 7, len(BLOB))
    result = outcomes(_native.simulate(spec, []))
    assert result == {ticket: (ABSENT, b""), again: (COMPLETE, BLOB[::-1])}


def test_a_blob_larger_than_agreed_takes_no_memory() -> None:
    spec = spec_of()
    spec.offer(0, 0, 7, BLOB)
    ticket = spec.fetch(MS, 1, 0, 7, len(BLOB) - 1)
    assert outcomes(_native.simulate(spec, [])) == {ticket: (TOO_LARGE, b"")}


def test_a_dead_server_is_asked_ever_more_rarely_and_holds_up_nobody_else() -> None:
    spec = spec_of(3)
    spec.freeze(0, 0, None)
    spec.offer(0, 2, 7, BLOB)
    dead = spec.fetch(MS, 1, 0, 7, len(BLOB))
    alive = spec.fetch(MS, 1, 2, 7, len(BLOB))
    spec.cancel(30 * S, 1, dead)
    result = _native.simulate(spec, [])
    assert outcomes(result) == {alive: (COMPLETE, BLOB)}
    ((_, at_ns, *_),) = result.fetched
    assert at_ns < S
    runs = -(-len(BLOB) // spec.payload_bytes)
    assert runs < result.counters[1].state_packets < runs + 50


def test_a_server_that_was_frozen_answers_when_it_is_back() -> None:
    spec = spec_of()
    spec.offer(0, 0, 7, BLOB)
    spec.freeze(0, MS + MS // 2, 5 * S)
    ticket = spec.fetch(MS, 1, 0, 7, len(BLOB))
    result = _native.simulate(spec, [])
    assert outcomes(result) == {ticket: (COMPLETE, BLOB)}
    assert 5 * S < result.fetched[0][1] < 7 * S


FORGED = {
    "another fetch": ({"seq": 9, "blob_bytes": 64, "run_bytes": 64}, "late"),
    "another blob": ({"blob_id": 8, "blob_bytes": 64, "run_bytes": 64}, "late"),
    "another edition": ({"edition": 5, "blob_bytes": 300_000, "run_bytes": 1280}, "late"),
    "another length": ({"blob_bytes": 400_000, "run_bytes": 1280}, "late"),
    "off the runs": ({"blob_bytes": 300_000, "blob_first": 64, "run_bytes": 1280}, "shape"),
    "a short run": ({"blob_bytes": 300_000, "run_bytes": 64}, "shape"),
    "a run that was not asked for": (
        {"blob_bytes": 300_000, "blob_first": 1280 * 200, "run_bytes": 1280},
        "shape",
    ),
    "beyond the end": ({"blob_bytes": 300_000, "blob_first": 299_999, "run_bytes": 1280}, "shape"),
    "an offset that wraps": ({"blob_bytes": 300_000, "blob_first": (1 << 64) - 1, "run_bytes": 1}, "shape"),
    "a length without end": ({"blob_bytes": (1 << 64) - 1, "run_bytes": 1280}, "late"),
    "a run of nothing": ({"blob_bytes": 300_000, "run_bytes": 0}, "shape"),
    "no edition": ({"edition": 0, "blob_bytes": 300_000, "run_bytes": 1280}, "shape"),
    "absent, in another edition": ({"flags": ANSWER | GONE, "edition": 5}, "late"),
    "absent, with bytes": ({"flags": ANSWER | GONE, "blob_bytes": 4, "run_bytes": 4}, "shape"),
    "an unknown flag": ({"flags": ANSWER | 8, "blob_bytes": 300_000, "run_bytes": 1280}, "type"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_answer_is_counted_and_changes_nothing(what: str) -> None:
    fields, reason = FORGED[what]
    spec = spec_of()
    spec.offer(0, 0, 7, BLOB)
    ticket = spec.fetch(MS, 1, 0, 7, len(BLOB))
    header = packet(spec, **fields)
    spec.inject(MS + 500_000, 1, header.pack() + bytes(header.run_bytes))
    result = _native.simulate(spec, [])
    assert outcomes(result) == {ticket: (COMPLETE, BLOB)}
    assert {name: count for name, count in result.counters[1].rejected.items() if count} == {reason: 1}


@pytest.mark.parametrize("cut", [0, 1, 1279])
def test_a_trimmed_answer_does_not_count(cut: int) -> None:
    spec = spec_of()
    spec.offer(0, 0, 7, BLOB)
    ticket = spec.fetch(MS, 1, 0, 7, len(BLOB))
    header = packet(spec, blob_bytes=len(BLOB), run_bytes=1280)
    spec.inject(MS + 500_000, 1, header.pack() + bytes(cut))
    result = _native.simulate(spec, [])
    assert outcomes(result) == {ticket: (COMPLETE, BLOB)}
    assert result.counters[1].rejected["shape"] == 1


def test_unwanted_and_unsound_requests_cost_the_server_little() -> None:
    spec = spec_of()
    for number in range(1000):  # all at once: more than one rank may have waiting
        header = packet(spec, flags=0, run_bytes=1280, edition=0, seq=number, source=1)
        spec.inject(MS, 0, header.pack())
    for fields in ({"run_bytes": 0}, {"run_bytes": 65_536}, {"run_bytes": 1, "blob_bytes": 1}):
        header = packet(spec, flags=0, source=1, **fields)
        spec.inject(2 * MS, 0, header.pack())
    spec.offer(3 * MS, 0, 7, BLOB)
    ticket = spec.fetch(4 * MS, 1, 0, 7, len(BLOB))
    result = _native.simulate(spec, [])
    assert outcomes(result) == {ticket: (COMPLETE, BLOB)}
    assert result.counters[0].rejected["shape"] == 3


def test_ops_come_first_and_a_blob_still_comes() -> None:
    """The link is full of gradients all the time."""
    ended = {}
    for fetching in (False, True):
        spec = spec_of(2, bytes_per_s=1.25e8, queue_bytes=1 << 20, paced=True, depth=2)
        buckets = with_ops(spec, 40, 200_000)
        if fetching:
            spec.offer(0, 0, 7, BLOB)
            ticket = spec.fetch(MS, 1, 0, 7, len(BLOB))
        result = _native.simulate(spec, buckets)
        assert all(np.all(bucket == 0.5) for op in buckets for bucket in op)
        ended[fetching] = max(report.ended_at for reports in result.reports for report in reports)
    assert outcomes(result) == {ticket: (COMPLETE, BLOB)}
    gradient_bytes = 40 * 4 * 200_000
    assert ended[True] < ended[False] * (1 + 2 * len(BLOB) / gradient_bytes + 0.02)


# ---- what a rank that rejoins wants ------------------------------------------------------------------------


def test_of_a_rejoin_the_latest_blob_that_a_rank_asked_for_in_vain_is_remembered() -> None:
    spec = spec_of(3)
    spec.offer(0, 0, REJOIN + 2, BLOB)
    for rank, blob_id in ((1, REJOIN), (1, REJOIN + 1), (2, REJOIN), (1, REJOIN + 2), (1, 7)):
        spec.fetch(MS, rank, 0, blob_id, len(BLOB))
    assert _native.simulate(spec, []).wanted == [{1: REJOIN + 1, 2: REJOIN}, {}, {}]


def test_a_flood_of_wishes_is_remembered_as_one_and_hides_no_other() -> None:
    spec = spec_of(3)
    for number in range(1000):
        fields = {"blob_id": REJOIN + number, "seq": number, "source": 1}
        spec.inject(MS, 0, packet(spec, flags=0, run_bytes=1280, edition=0, **fields).pack())
    spec.fetch(2 * MS, 2, 0, REJOIN + 5, 10)
    wanted = _native.simulate(spec, []).wanted[0]
    assert wanted == {1: REJOIN + 999, 2: REJOIN + 5}


def test_a_rejoin_takes_an_eighth_of_a_busy_link_and_another_blob_a_fiftieth() -> None:
    came, ended = {}, {}
    for blob_id in (None, 7, REJOIN):
        spec = spec_of(2, bytes_per_s=1.25e8, queue_bytes=1 << 20, paced=True, depth=2)
        buckets = with_ops(spec, 60, 200_000)
        if blob_id is not None:
            spec.offer(0, 0, blob_id, BLOB)
            spec.fetch(MS, 1, 0, blob_id, len(BLOB))
        result = _native.simulate(spec, buckets)
        assert all(np.all(bucket == 0.5) for op in buckets for bucket in op)
        ended[blob_id] = max(report.ended_at for reports in result.reports for report in reports)
        came[blob_id] = result.fetched[0][1] if result.fetched else 0
    assert came[REJOIN] < came[7] / 3
    gradient_bytes = 60 * 4 * 200_000
    assert ended[REJOIN] < ended[None] * (1 + 2 * len(BLOB) / gradient_bytes + 0.02)


def test_blobs_travel_between_real_sockets_while_ops_do(tmp_path: Path) -> None:
    big = np.random.default_rng(1).integers(0, 256, 5_000_000, np.uint8)
    with open_groups(tmp_path, 3) as groups:
        states = [group._ops.state for group in groups]
        for rank, state in enumerate(states):
            state.offer(rank, big[rank:])
        fetches = {
            (rank, server): states[rank].fetch(server, server, big.nbytes)
            for rank, server in itertools.permutations(range(3), 2)
        }
        nowhere = states[0].fetch(1, 99, 10)
        allreduce(groups, vectors(3, 100_000))
        for (_, server), fetch in fetches.items():
            assert fetch.poll(LIMIT_NS) is FetchStatus.COMPLETE
            assert np.array_equal(fetch.blob, big[server:])
        assert nowhere.poll(LIMIT_NS) is FetchStatus.ABSENT
        states[1].withdraw(1)
        under_way = states[0].fetch(1, 1, big.nbytes)
        assert under_way.poll(LIMIT_NS) is FetchStatus.ABSENT
        del under_way
        dropped = states[0].fetch(2, 2, big.nbytes)
        del dropped
        assert groups[0].stats().state_bytes > 2 * big.nbytes * 0.99
        wish = states[0].fetch(2, REJOIN + 3, 10)
        assert wish.poll(LIMIT_NS) is FetchStatus.ABSENT
        assert (states[2].take_wanted(), states[2].take_wanted()) == ({0: REJOIN + 3}, {})
        last = states[0].fetch(2, 1234567, 10)
    assert last.poll() in (FetchStatus.ABSENT, FetchStatus.CLOSED)


def test_a_grid_has_no_channel_for_state(tmp_path: Path) -> None:
    with open_groups(tmp_path, 4, rows=2) as groups:
        assert [group._ops.state for group in groups] == [None] * 4
