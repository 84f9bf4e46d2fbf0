"""The ledger: what a run's ranks have on record, and what is left of it when a disk or a kill took some."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tailcut import ConfigError, Group, Ledger, Report, Scenario, Simulation, _native, simulate
from tailcut._native import LedgerFile
from tailcut.ledger.book import read_rank
from tailcut.ledger.fates import Fates, Runs, count_of
from tailcut.ledger.frames import Damage, Frame, framed, read, read_ring
from tailcut.ledger.records import Kind, OpRecord, Start, op_head, start_payload
from tailcut.ledger.writer import LedgerWriter
from tests.groups import allreduce, open_groups, vectors

ROUNDING = 1e-6
"""Times are kept in microseconds."""


def records_of(simulation: Simulation, rank: int) -> list[OpRecord]:
    """What a rank of a simulated run would have on record."""
    about = {"rank": rank, "ranks": simulation.scenario.ranks, "rows": simulation.scenario.rows}
    start = Start.of(start_payload(about))
    return [
        OpRecord(start, op_head(0, ()) + native.record(), {}) for native in simulation.native.reports[rank]
    ]


def present(runs: Runs, granules: int) -> bytes:
    """A byte for each granule: whether it is in the runs."""
    flags = bytearray(granules)
    for first, last in runs:
        flags[first:last] = b"\1" * (last - first)
    return bytes(flags)


def held(fates: Fates, shard: int) -> bytes:
    came, empty = (present(runs[shard], fates.granules[shard]) for runs in (fates.answered, fates.empty))
    return bytes(a & ~e & 1 for a, e in zip(came, empty, strict=True))


# ---- what is on record -------------------------------------------------------------------------------------


def test_what_wait_returned_is_on_record(tmp_path: Path) -> None:
    reports: list[list[Report]] = []
    with open_groups(tmp_path / "store", 3, ledger=str(tmp_path / "run"), codec="planes", planes=4) as groups:
        reports += [allreduce(groups, vectors(3, 5000, op), key="weights") for op in range(3)]
    ledger = Ledger.open(tmp_path / "run")
    assert list(ledger.ranks) == [0, 1, 2]
    assert list(ledger.losses()) == []
    for seq, of_op in enumerate(reports):
        for rank, told in enumerate(of_op):
            kept = ledger.op(seq)[rank].report
            assert (kept.seq, kept.status, kept.key) == (told.seq, told.status, "weights")
            assert (kept.length, kept.epoch, kept.verdicts) == (told.length, told.epoch, told.verdicts)
            assert kept.traffic == told.traffic
            assert kept.elapsed_s == pytest.approx(told.elapsed_s, abs=2 * ROUNDING)
            assert kept.epsilon == pytest.approx(told.epsilon, rel=1e-4, abs=1e-6)
            for was, now in zip(told.links, kept.links, strict=True):
                assert now.scatter.coords == was.scatter.coords
                assert now.gather.last_s == pytest.approx(was.gather.last_s, abs=2 * ROUNDING)
                assert (now.awaited, now.sent_packets) == (was.awaited, was.sent_packets)


def test_the_terms_of_an_op_and_who_it_belongs_to_are_on_record(tmp_path: Path) -> None:
    with open_groups(
        tmp_path / "store", 2, ledger=str(tmp_path), codec="planes", planes=5, deadline_s=7, seed=3
    ) as groups:
        allreduce(groups, vectors(2, 300))
    ledger = Ledger.open(tmp_path)
    assert ledger.about["codec"] == "planes"
    assert ledger.about["config"]["seed"] == 3
    assert len(ledger.about["packet_bytes"]) == 2
    op = ledger.op(0)[1]
    assert op.terms["bounds"]["deadline_s"] == 7.0
    assert op.terms["scatter"]["planes"] == op.terms["gather"]["planes"] == 5
    assert op.key is None


LOSSY = Scenario(
    ranks=4,
    length=40_000,
    ops=12,
    buckets=2,
    depth=2,
    codec="planes",
    planes=6,
    record=True,
    loss=0.05,
    trim=0.2,
    resend=False,
    trim_bytes=256,
    deadline_s=0.05,
    seed=5,
)


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_every_granule_has_the_fate_that_the_core_told(codec: str) -> None:
    simulation = simulate(replace(LOSSY, codec=codec))
    missing = 0
    for rank in range(simulation.scenario.ranks):
        for record, native in zip(records_of(simulation, rank), simulation.native.reports[rank], strict=True):
            fates, shards = record.fates, range(simulation.scenario.ranks)
            own = fates.granules[record.own_shard]
            assert [present(runs, own) for runs in fates.contributions] == native.contributions()
            assert [held(fates, shard) for shard in shards] == native.held()
            missing += sum(own - count_of(runs) for runs in fates.contributions)
    assert missing > 100


def test_what_came_trimmed_is_on_record_with_the_bytes_that_came() -> None:
    simulation = simulate(LOSSY)
    trimmed = {
        (
            int(p["seq"]),
            int(p["source"]),
            int(p["destination"]),
            int(p["first"]) // 64,
            int(p["payload_bytes"]),
        )
        for p in simulation.native.deliveries()
        if not p["gather"] and p["payload_bytes"] < p["stated_payload_bytes"]
    }
    cuts = {
        (cut.seq, cut.source, rank, cut.first + time * cut.granules, cut.payload_bytes)
        for rank in range(4)
        for record in records_of(simulation, rank)
        for cut in record.fates.cuts
        for time in range(cut.times)
        if cut.stage == "scatter"
    }
    assert len(cuts) > 50
    assert cuts <= trimmed


def test_late_parts_are_on_record_where_they_were_taken_in() -> None:
    simulation = simulate(replace(LOSSY, trim=0.0, loss=0.2, resend=True, deadline_s=0.004, ops=40))
    taken = {"scatter": 0, "gather": 0}
    for rank in range(4):
        for record in records_of(simulation, rank):
            coords = 0
            for use in record.fates.uses:
                assert use.seq < use.user
                taken[use.stage] += use.last - use.first
                if use.stage == "gather" and use.user == record.seq:
                    coords += use.last - use.first
            assert (coords > 0) == (record.report.carried_coords > 0)
    assert taken["scatter"] > 0
    assert taken["gather"] > 0


def test_the_hash_is_that_of_the_own_shards_result() -> None:
    simulation = simulate(replace(LOSSY, loss=0.0, trim=0.0))
    for rank in range(4):
        for op, record in enumerate(records_of(simulation, rank)):
            begin, end = _native.shard_range(40_000, 4, record.own_shard)
            shard = simulation.results[op][rank][begin:end]
            assert record.fates.mean_hash == _native.hash_of(shard.view(np.uint8))
            assert (
                _native.hash_of(np.nextafter(shard, np.float32(9)).view(np.uint8)) != record.fates.mean_hash
            )


# ---- what it takes -----------------------------------------------------------------------------------------


def test_a_clean_op_takes_at_most_200_bytes(tmp_path: Path) -> None:
    with open_groups(tmp_path / "store", 4, ledger=str(tmp_path)) as groups:
        for op in range(20):
            allreduce(groups, vectors(4, 100_000, op), key="bucket")
    for ledger in Ledger.open(tmp_path).ranks.values():
        sizes = [len(framed(2, 1000, op.payload)) for op in ledger.ops if not op.report.missing_from]
        assert sizes
        assert max(sizes) <= 200


def test_a_packet_takes_at_most_half_a_byte_at_one_percent_loss() -> None:
    scenario = replace(LOSSY, loss=0.01, trim=0.0, length=4_000_000, ops=4, deadline_s=1.0)
    simulation = simulate(scenario)
    records = [record for rank in range(4) for record in records_of(simulation, rank)]
    packets = sum(record.report.traffic.received_packets for record in records)
    assert sum(len(record.payload) for record in records) <= 0.5 * packets


# ---- damage ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The ledger of a rank."""
    directory = tmp_path_factory.mktemp("whole")
    with open_groups(directory / "store", 2, ledger=str(directory)) as groups:
        for op in range(30):
            allreduce(groups, vectors(2, 2000, op), key="bucket")
    return next(directory.glob("*.rank0001.ledger")).read_bytes()


def whole_and_lost(content: bytes) -> tuple[list[Frame], list[Damage]]:
    found = list(read(content))
    return [f for f in found if isinstance(f, Frame)], [d for d in found if isinstance(d, Damage)]


def test_a_ledger_that_ends_anywhere_is_read_to_its_last_whole_record(content: bytes) -> None:
    frames, damage = whole_and_lost(content)
    assert len(frames) > 30
    assert not damage
    rng = random.Random(1)
    for size in (rng.randrange(len(content)) for _ in range(1000)):
        kept, lost = whole_and_lost(content[:size])
        ends = [*(frame.at for frame in frames[1:]), len(content)]
        assert kept == frames[: sum(end <= size for end in ends)]
        assert bool(lost) == (size not in (0, *ends))
        assert all(entry.records is None and entry.at + entry.size_bytes == size for entry in lost)


def test_a_flipped_bit_costs_its_record_and_no_other(content: bytes) -> None:
    frames, _ = whole_and_lost(content)
    rng = random.Random(2)
    for bit in (rng.randrange(8 * len(content)) for _ in range(1000)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        kept, lost = whole_and_lost(bytes(flipped))
        hit = max(frame.number for frame in frames if frame.at <= bit // 8)
        assert kept == [frame for frame in frames if frame.number != hit]
        (told,) = lost
        assert told.records == (1 if hit < len(frames) - 1 else None)


def test_a_reader_says_what_is_lost(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "default.00000000abcd.rank0001.ledger"
    frames, _ = whole_and_lost(content)
    damaged = bytearray(content)
    damaged[frames[10].at + 9] ^= 0xFF
    path.write_bytes(damaged[: frames[20].at + 5])
    ledger = Ledger.open(tmp_path)
    assert list(ledger.losses()) == [
        "rank 0: its ledger is not here",
        f"rank 1: {frames[11].at - frames[10].at} bytes from byte {frames[10].at} on are damaged: "
        "1 of the records are lost",
        f"rank 1: the last 5 bytes, from byte {frames[20].at} on, are no whole record",
        "rank 1: it ends without a close: the rank was killed, or still runs",
    ]
    assert len(ledger.ranks[1].ops) > 10


def test_with_its_first_record_damaged_a_ledger_is_read_by_the_second(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "default.00000000abcd.rank0001.ledger"
    path.write_bytes(b"\0" * 100 + content[100:])
    assert len(read_rank(path).ops) == 30


def test_a_ledger_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    payload = start_payload({"rank": 0, "ranks": 1, "rows": 1, "tailcut": "9.9"})
    newer = payload.replace(b'"format":2', b'"format":7')
    (tmp_path / "default.00000000abcd.rank0000.ledger").write_bytes(framed(1, 0, newer))
    with pytest.raises(ConfigError, match=r"format 7 \(tailcut 9.9\).*format 2"):
        Ledger.open(tmp_path)


def test_a_killed_rank_has_all_ops_on_record_that_it_has_told_of(tmp_path: Path) -> None:
    program = (
        "import sys, time, numpy as np, tailcut\n"
        "group = tailcut.Group(0, 1, tailcut.FileStore(sys.argv[1]), ledger=sys.argv[2])\n"
        "for op in range(50):\n"
        "    group.allreduce(np.ones(100, np.float32)).wait()\n"
        "while group._ops.ledger.file.waiting_records: time.sleep(0.001)\n"
        "print('written', flush=True)\n"
        "while True: group.allreduce(np.ones(100, np.float32)).wait()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    ledger = Ledger.open(tmp_path).ranks[0]
    assert [op.seq for op in ledger.ops][:50] == list(range(50))
    assert not ledger.closed


# ---- ops under way -----------------------------------------------------------------------------------------


def test_of_a_ring_all_whole_records_are_read_in_order() -> None:
    frames = [framed(7, number, bytes([number]) * 20) for number in range(9)]
    later = b"".join(frames[6:])  # written over the first three
    ring = later + b"".join(frames[3:6])
    assert [frame.number for frame in read_ring(ring)] == [3, 4, 5, 6, 7, 8]
    torn = bytearray(ring)
    torn[len(later) + 9] ^= 1  # in the fourth
    assert [frame.number for frame in read_ring(bytes(torn))] == [4, 5, 6, 7, 8]
    assert read_ring(bytes(1000)) == []


KILLED_IN_AN_OP = """
import os, signal, sys, threading, numpy as np, tailcut
rank, store, ledger = int(sys.argv[1]), sys.argv[2], sys.argv[3]
group = tailcut.Group(rank, 2, tailcut.FileStore(store), ledger=ledger, codec="raw", late="carry")
for op in range(20):
    group.allreduce(np.full(5000, rank + op, np.float32), key="bucket").wait()
if rank == 1:
    before = group.stats().traffic.sent_bytes
    work = group.allreduce(np.full(5000, 9.0, np.float32), key="bucket")
    while group.stats().traffic.sent_bytes < before + 5000:  # it is on record before packets leave
        pass
    print("entered", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
print("done", flush=True)
sys.stdin.readline()
group.allreduce(np.full(5000, 1.0, np.float32), key="bucket").wait()
os._exit(0)
"""


def test_what_a_rank_was_killed_in_is_on_record(tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", KILLED_IN_AN_OP, str(rank), str(tmp_path / "store"), str(tmp_path)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start(0) as zero, start(1) as one:
        assert zero.stdout is not None
        assert one.stdout is not None
        assert (zero.stdout.readline(), one.stdout.readline()) == ("done\n", "entered\n")
        one.communicate("now\n")
        zero.communicate("go on\n")
    ledger = Ledger.open(tmp_path)
    killed = ledger.ranks[1]
    assert [op.seq for op in killed.ops] == list(range(20))
    assert not killed.closed
    (under_way,) = killed.open
    assert (under_way.seq, under_way.entered, under_way.contributed) == (20, True, True)


def test_a_group_that_was_closed_leaves_no_ops_under_way(tmp_path: Path) -> None:
    with open_groups(tmp_path / "store", 2, ledger=str(tmp_path)) as groups:
        allreduce(groups, vectors(2, 100), key="bucket")
        assert len(list(tmp_path.glob("*.open"))) == 2
    assert not list(tmp_path.glob("*.open"))


# ---- the disk ----------------------------------------------------------------------------------------------


def settle(book: LedgerFile) -> None:
    """Wait until the disk has all that it gets."""
    while book.waiting_records:
        threading.Event().wait(0.001)


def test_a_slow_disk_costs_records_and_never_waits() -> None:
    out, into = os.pipe()  # a disk that takes what a pipe holds, until somebody reads it
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 4096)
    book = LedgerFile(into, 10_000)
    for number in range(100):
        book.append(Kind.NOTE, bytes([number]) * 500)  # more than pipe and queue hold: it must not block
    assert book.problem == "the disk is too slow"
    left_out = book.left_out
    assert 0 < left_out < 100
    content = bytearray()

    def read_all() -> None:
        while piece := os.read(out, 1 << 16):
            content.extend(piece)

    reader = threading.Thread(target=read_all)
    reader.start()
    settle(book)
    book.append(Kind.NOTE, b"after")
    assert book.close(60 * 10**9)
    reader.join()
    os.close(out)
    frames, damage = whole_and_lost(bytes(content))
    assert not damage
    gaps = [json.loads(frame.payload) for frame in frames if frame.kind == Kind.GAP]
    assert {gap["reason"] for gap in gaps} == {"the disk is too slow"}
    missing = sum(gap["records"] for gap in gaps)  # several gaps if the disk took some records in between
    assert missing >= left_out
    assert [frame.number for frame in frames] == list(range(len(frames)))
    assert frames[-1].payload == b"after"
    assert sum(frame.kind == Kind.NOTE for frame in frames) + missing == 101


def test_closing_does_not_wait_for_a_disk_that_is_stuck() -> None:
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 4096)
    book = LedgerFile(into, 1 << 20)
    book.append(Kind.NOTE, bytes(100_000))
    assert not book.close(10**6)
    os.close(out)


def test_a_full_disk_leaves_whole_records_and_a_gap(tmp_path: Path) -> None:
    book = LedgerWriter(tmp_path / "g.00000000abcd.rank0000.ledger", {"rank": 0, "ranks": 1, "rows": 1})
    book.note("before")
    settle(book.file)
    size = book._path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))  # room for half of a record
    try:
        for _ in range(5):
            book.note("lost")
            settle(book.file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert book.file.left_out == 5
    (alarm,) = book.take_alarms()
    assert "has gaps (File too large): training goes on" in alarm
    assert book.take_alarms() == []
    assert book._path.stat().st_size == size
    book.note("after")
    book.close()
    ledger = read_rank(book._path)
    assert [note.event for note in ledger.notes] == ["before", "after"]
    assert [gap.records for gap in ledger.gaps] == [5]
    assert ledger.closed
    assert not ledger.damage


def test_a_group_warns_once_of_gaps_and_goes_on(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_groups(tmp_path / "store", 1, ledger=str(tmp_path)) as (group,):
        file = written_by(group)
        settle(file)
        resource.setrlimit(resource.RLIMIT_FSIZE, (next(tmp_path.glob("*.ledger")).stat().st_size, before[1]))
        try:
            with pytest.warns(RuntimeWarning, match=r"the ledger .* has gaps \(File too large\)") as warned:
                allreduce_apart(group, 5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert len(warned) == 1
        group.allreduce(np.ones(8, np.float32)).wait()
    ledger = Ledger.open(tmp_path).ranks[0]
    assert sum(gap.records for gap in ledger.gaps) == 5
    assert [op.seq for op in ledger.ops] == [5]


def written_by(group: Group) -> LedgerFile:
    assert isinstance(group._ops.ledger, LedgerWriter)
    return group._ops.ledger.file


def allreduce_apart(group: Group, ops: int) -> None:
    """Ops of which each is on the disk, or is not, before the next begins."""
    for _ in range(ops):
        group.allreduce(np.ones(8, np.float32)).wait()
        settle(written_by(group))


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"ledger='.*file' cannot be written \(.+\); name another directory"),
        open_groups(tmp_path / "store", 1, ledger=str(tmp_path / "file")),
    ):
        pass


# ---- several runs ------------------------------------------------------------------------------------------


def test_of_several_runs_in_a_directory_the_latest_is_read_or_the_one_that_is_named(tmp_path: Path) -> None:
    for run in range(2):
        with open_groups(tmp_path / f"store-{run}", 1, ledger=str(tmp_path)) as (group,):
            for _ in range(run + 1):
                group.allreduce(np.ones(8, np.float32)).wait()
    names = sorted({path.name.split(".rank")[0] for path in tmp_path.glob("*.ledger")})
    assert len(names) == 2
    latest = Ledger.open(tmp_path)
    assert len(latest.ranks[0].ops) == 2
    (other,) = set(names) - {latest.run}
    assert len(Ledger.open(tmp_path, run=other).ranks[0].ops) == 1
    with pytest.raises(ConfigError, match=r"no run in .* is called 'x'"):
        Ledger.open(tmp_path, run="x")


def test_a_directory_without_a_ledger_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no ledger: run with Config"):
        Ledger.open(tmp_path)
    with pytest.raises(ConfigError, match="is no directory"):
        Ledger.open(tmp_path / "nowhere")
