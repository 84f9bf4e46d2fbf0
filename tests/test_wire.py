"""The bytes of the header (docs/wire-format.md, table 1), and datagrams that nobody sent."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tailcut import Scenario, _native, simulate
from tests.oracle import rank_order_mean
from tests.test_rules import forged, group_tag

TABLE_1 = struct.Struct("<BBBBHH6sHIIIIIHHIIfHHHHBxH")
(MAGIC, VERSION, TYPE, CODEC, FLAGS, SOURCE, TAG, EPOCH, NUMBER, SEQ, KEY, LENGTH) = range(12)
(FIRST, COUNT, SHARD, STAMP, ENTRY, SCALE, GAIN_FULL, GAIN_ONE, LIFE, LOSS_SCALE, INCAST) = range(12, 23)


def test_the_header_has_the_documented_bytes() -> None:
    header = _native.Header()
    header.type, header.flags, header.group_tag, header.number = 1, 0x105, 0x112233445566, 0x778899AA
    header.source, header.shard, header.seq, header.bucket_len = 3, 2, 77, 1_000_000
    header.first, header.count, header.stamp_us, header.entry_us = 6400, 320, 123_456, 999
    header.key, header.epoch, header.incarnation = 0xDEADBEEF, 7, 8
    header.loss_scale_tag, header.incast, header.stands_for = 9, 4, 0x4200
    packed = header.pack()
    assert len(packed) == TABLE_1.size == _native.HEADER_BYTES == 64
    assert TABLE_1.unpack(packed) == (
        *(0x7C, 2, 1, 0, 0x105, 3, bytes.fromhex("665544332211"), 7, 0x778899AA, 77, 0xDEADBEEF, 1_000_000),
        *(6400, 320, 2, 123_456, 999, 0.0, 0, 0, 8, 9, 4, 0x4200),
    )
    parsed, reason = _native.parse_header(packed)
    assert (parsed.key, parsed.epoch, parsed.incarnation, parsed.loss_scale_tag) == (0xDEADBEEF, 7, 8, 9)
    assert (parsed.flags, parsed.incast, parsed.stands_for, reason) == (0x105, 4, 0x4200, "")


def test_feedback_has_its_own_fields_where_data_has_its_place() -> None:
    header = _native.Header()
    header.type, header.first, header.count, header.bucket_len = 2, 64, 65, 66
    header.echo_us, header.arrival_us, header.delay_us, header.latest = 4242, 17, 18, 0x10013
    header.error_energy, header.error_op = 0.25, 99
    packed = header.pack()
    table = TABLE_1.unpack(packed)
    assert (table[LENGTH], table[FIRST], table[ENTRY]) == (17, 4242, 18)
    assert (table[COUNT], table[SHARD]) == (0x13, 1)  # the two halves of latest
    assert (struct.unpack_from("<f", packed, 24)[0], table[LOSS_SCALE]) == (0.25, 99)
    parsed, reason = _native.parse_header(packed)
    assert (parsed.echo_us, parsed.arrival_us, parsed.delay_us, parsed.latest) == (4242, 17, 18, 0x10013)
    assert (parsed.error_energy, parsed.error_op) == (0.25, 99)
    assert (parsed.first, parsed.count, parsed.bucket_len, reason) == (0, 0, 0, "")


def test_feedback_to_a_rank_that_is_behind_says_which_means_are_left() -> None:
    header = _native.Header()
    header.type, header.flags, header.served_from, header.error_energy = 2, 4, 0xFFFF_FFF0, 0.5
    parsed, reason = _native.parse_header(header.pack())
    assert (parsed.served_from, parsed.error_energy, reason) == (0xFFFF_FFF0, 0.0, "")
    header.flags = 0
    parsed, _ = _native.parse_header(header.pack())
    assert (parsed.served_from, parsed.error_energy) == (0, 0.5)


def test_the_version_before_is_refused() -> None:
    """W2: its header is shorter, but magic and version have always been in the same place."""
    packed = bytearray(_native.Header().pack())
    packed[1] = 1
    assert _native.parse_header(bytes(packed))[1] == "version"


def test_an_extension_and_bytes_that_must_be_zero_are_refused() -> None:
    """W3: a receiver that does not check a tag must not act on what carries one."""
    for kind in (1, 2, 3):
        header = _native.Header()
        header.type, header.flags = kind, 64
        assert _native.parse_header(header.pack())[1] == "type"
    for kind, places in {1: (61,), 2: (61,), 3: (61,), 4: (61, 62, 63)}.items():
        for at in places:
            header = _native.Header()
            header.type = kind
            packed = bytearray(header.pack())
            packed[at] = 1
            assert _native.parse_header(bytes(packed))[1] == "type"


def test_an_error_energy_is_a_share() -> None:
    """W7: of the mean's energy, a receiver lacks nothing, all or something in between."""
    for energy, reason in {0.0: "", 1.0: "", -0.1: "shape", 1.1: "shape", float("nan"): "shape"}.items():
        header = _native.Header()
        header.type, header.error_energy = 2, energy
        assert _native.parse_header(header.pack())[1] == reason


def test_another_epoch_or_life_is_refused() -> None:
    """W13: what was sent before the group agreed anew, or by an earlier life of a rank, is refused."""
    for name in ("epoch", "incarnation"):
        header = forged(group_tag=group_tag(0), source=1, shard=0, bucket_len=3000, count=64)
        setattr(header, name, 1)
        simulation = run_with([header.pack() + bytes(256)])
        assert simulation.native.counters[0].rejected["epoch"] == 2


def planes_header(**values: object):
    header = _native.Header()
    for name, value in ({"codec": 1, "planes": 16, "count": 640, "scale": 0.5} | values).items():
        setattr(header, name, value)
    return header


def test_planes_have_the_documented_bytes() -> None:
    packed = planes_header(planes=5, gain_full=0x1234, gain_one=0x9876).pack()
    assert TABLE_1.unpack(packed)[CODEC] == 1 << 5 | 5
    assert TABLE_1.unpack(packed)[SCALE : GAIN_ONE + 1] == (0.5, 0x1234, 0x9876)
    parsed, reason = _native.parse_header(packed)
    assert (parsed.codec, parsed.planes, parsed.scale, reason) == (1, 5, 0.5, "")
    assert (parsed.gain_full, parsed.gain_one) == (0x1234, 0x9876)


def test_planes_state_their_payload() -> None:
    for planes in range(1, 17):
        for count in (1, 64, 65, 640):
            stride = -(-count // 64) * 8
            assert planes_header(planes=planes, count=count).stated_payload_bytes == planes * stride
            measured = planes_header(planes=planes, count=count, gain_one=7)
            table = 2 * min(max(planes - 2, 0), 8)
            assert measured.stated_payload_bytes == planes * stride + table
    assert planes_header(flags=2).stated_payload_bytes == 0


def test_unknown_codecs_and_planes_are_refused() -> None:
    """W3: raw has no planes, planes has 1 to 16, and only DATA has a codec."""
    for codec in range(8):
        for planes in range(32):
            known = (codec, planes) == (0, 0) or (codec == 1 and 1 <= planes <= 16)
            reason = _native.parse_header(planes_header(codec=codec, planes=planes).pack())[1]
            assert reason == ("" if known else "type")
    assert _native.parse_header(planes_header(type=2).pack())[1] == "type"


def test_scales_and_gains_that_nobody_sends_are_refused() -> None:
    """W7: a scale is a number, or NaN with the flag NON-FINITE; a gain is a number above -1."""
    for scale in (-1.0, float("inf"), float("-inf"), float("nan")):
        assert _native.parse_header(planes_header(scale=scale).pack())[1] == "shape"
    assert _native.parse_header(planes_header(scale=float("nan"), flags=4).pack())[1] == ""
    assert _native.parse_header(planes_header(scale=float("inf"), flags=4).pack())[1] == "shape"
    for gain, reason in {0x7C00: "shape", 0x7E01: "shape", 0xBC00: "shape", 0xBBFF: "", 0x7BFF: ""}.items():
        assert _native.parse_header(planes_header(gain_one=gain).pack())[1] == reason
        assert _native.parse_header(planes_header(gain_full=gain).pack())[1] == reason


def test_an_op_does_not_take_planes_for_raw() -> None:
    header = forged(group_tag=group_tag(0), source=1, shard=0, bucket_len=3000, count=64)
    header.codec, header.planes, header.scale = 1, 16, 1.0
    simulation = run_with([header.pack() + bytes(128)])
    assert simulation.native.counters[0].rejected["type"] == 2
    expected = rank_order_mean(simulation.inputs[0]).tobytes()
    assert all(result.tobytes() == expected for result in simulation.results[0])


fields = st.fixed_dictionaries(
    {
        "type": st.integers(1, 3),
        "group_tag": st.integers(0, 2**48 - 1),
        "number": st.integers(0, 2**32 - 1),
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
    known = {1: 1 | 2 | 4 | 8 | 16 | 32 | 128 | 256, 2: 1 | 2 | 4 | 8 | 16 | 32 | 128, 3: 1 | 2 | 4 | 8}
    for kind, mask in known.items():
        for bit in range(16):
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
    of_data = ("bucket_len", "shard", "count", "entry_us")  # FEEDBACK has others in their place
    assert {name: getattr(parsed, name) for name in values if values["type"] == 1 or name not in of_data} == {
        name: value for name, value in values.items() if values["type"] == 1 or name not in of_data
    }


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
        assert native.ended_at - native.entered_at <= 100_000_000
        assert np.asarray(simulation.results[0][rank]).shape == (3000,)
