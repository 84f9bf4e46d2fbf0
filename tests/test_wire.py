"""The bytes of the header (docs/wire-format.md, table 1), and datagrams that nobody sent."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tailcut import Scenario, _native, simulate
from tests.oracle import rank_order_mean
from tests.test_rules import forged, group_tag

TABLE_1 = struct.Struct("<BBBBQHHIIIHBBIIfHH")


def test_the_header_has_the_documented_bytes() -> None:
    header = _native.Header()
    header.type, header.flags, header.group_tag = 1, 5, 0x1122334455667788
    header.source, header.shard, header.seq, header.bucket_len = 3, 2, 77, 1_000_000
    header.first, header.count, header.stamp_us, header.entry_us = 6400, 320, 123_456, 999
    packed = header.pack()
    assert len(packed) == TABLE_1.size == _native.HEADER_BYTES == 48
    assert TABLE_1.unpack(packed) == (
        *(0x7C, 1, 1, 5, 0x1122334455667788, 3, 2, 77, 1_000_000, 6400, 320),
        *(0, 0, 123_456, 999, 0.0, 0, 0),
    )


def test_feedback_echoes_where_data_has_its_first_coordinate() -> None:
    header = _native.Header()
    header.type, header.echo_us, header.first = 2, 4242, 64
    assert TABLE_1.unpack(header.pack())[9] == 4242
    parsed, reason = _native.parse_header(header.pack())
    assert (parsed.echo_us, parsed.first, reason) == (4242, 0, "")


fields = st.fixed_dictionaries(
    {
        "type": st.integers(1, 3),
        "group_tag": st.integers(0, 2**64 - 1),
        "source": st.integers(0, 2**16 - 1),
        "shard": st.integers(0, 2**16 - 1),
        "seq": st.integers(0, 2**32 - 1),
        "bucket_len": st.integers(0, 2**32 - 1),
        "count": st.integers(0, 2**16 - 1),
        "stamp_us": st.integers(0, 2**32 - 1),
        "entry_us": st.integers(0, 2**32 - 1),
    }
)


def test_a_flag_of_another_type_is_refused() -> None:
    known = {1: 1 | 2 | 4 | 128, 2: 1 | 8, 3: 1 | 8}
    for kind, mask in known.items():
        for bit in range(8):
            header = _native.Header()
            header.type, header.flags = kind, 1 << bit
            assert (_native.parse_header(header.pack())[1] == "type") == (not mask >> bit & 1)


@given(fields)
def test_what_is_packed_is_parsed(values: dict[str, int]) -> None:
    header = _native.Header()
    for name, value in values.items():
        setattr(header, name, value)
    parsed, reason = _native.parse_header(header.pack())
    assert reason == ""
    assert {name: getattr(parsed, name) for name in values} == values


def run_with(datagrams: list[bytes]):
    """Three ranks, of which rank 0 is handed the datagrams before anybody has entered and in the middle."""
    injections = [(at_s, 0, datagram) for at_s in (0.0, 0.001015) for datagram in datagrams]
    return simulate(Scenario(ranks=3, length=3000, compute_s=[[0.001] * 3], injections=injections))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=400), max_size=20))
def test_arbitrary_datagrams_are_counted_and_change_nothing(datagrams: list[bytes]) -> None:
    simulation = run_with(datagrams)
    rejected = simulation.native.counters[0].rejected
    assert sum(rejected.values()) == 2 * len(datagrams)
    expected = rank_order_mean(simulation.inputs[0]).tobytes()
    assert all(result.tobytes() == expected for result in simulation.results[0])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(fields, st.binary(max_size=300)), max_size=20))
def test_well_formed_headers_of_another_group_are_counted_and_change_nothing(packets) -> None:
    datagrams = [forged(**values | {"group_tag": 1}).pack() + payload for values, payload in packets]
    simulation = run_with(datagrams)
    assert simulation.native.counters[0].rejected["group"] == 2 * len(datagrams)
    expected = rank_order_mean(simulation.inputs[0]).tobytes()
    assert all(result.tobytes() == expected for result in simulation.results[0])


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(fields, st.binary(max_size=300)), min_size=1, max_size=30))
def test_a_member_that_lies_harms_neither_memory_nor_the_deadline(packets) -> None:
    """With the tag, a liar can spoil values and votes; every op still ends, once, by its deadline."""
    datagrams = [
        forged(
            **values
            | {"group_tag": group_tag(0), "source": 1 + values["source"] % 2, "seq": values["seq"] % 4}
        ).pack()
        + payload
        for values, payload in packets
    ]
    simulation = run_with(datagrams)
    for rank in range(3):
        (native,) = simulation.native.reports[rank]
        assert native.finished_at - native.entered_at <= 100_000_000
        assert np.asarray(simulation.results[0][rank]).shape == (3000,)
