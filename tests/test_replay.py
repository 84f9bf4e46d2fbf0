"""Replay: ops computed again from their ledgers have the bits that they had, whatever the network did."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailcut import ConfigError, Ledger, ReplayError, Report, Scenario, Simulation, simulate
from tailcut.codec import trimmed_payload_bytes
from tailcut.engine.loss_scale import tag_of
from tailcut.ledger.book import RankLedger
from tailcut.ledger.records import Note, OpRecord, Start, op_head, start_payload
from tailcut.policy import epochs as epochs_policy
from tailcut.policy.epochs import Agreement, Step
from tailcut.replay import deliveries, single
from tailcut.replay.deliveries import Deliveries
from tailcut.replay.exchange import FileExchange, MemoryExchange
from tailcut.replay.granules import without
from tailcut.replay.player import Player
from tailcut.replay.script import Script
from tailcut.replay.together import play_together
from tailcut.simulation.scenario import Freeze, Hang
from tailcut.tools.ledger.explain import explain


def ledger_of(simulation: Simulation, notes: tuple[Note, ...] = ()) -> Ledger:
    """What the ranks of a simulated run would have kept."""
    scenario = simulation.scenario
    config = {
        "window_ops": scenario.window_ops,
        "seed": scenario.seed,
        "late": scenario.late,
        "lanes": 1,
        "over_budget": "proceed",
    }
    ranks = {}
    for rank, reports in enumerate(simulation.native.reports):
        about = {
            "rank": rank,
            "ranks": scenario.ranks,
            "rows": 1,
            "codec": scenario.codec,
            "packet_bytes": [scenario.packet_bytes] * scenario.ranks,
            "trim_payload_bytes": [trimmed_payload_bytes(scenario.trim_bytes)] * scenario.ranks,
            "config": config,
        }
        start = Start.of(start_payload(about))
        ops = tuple(
            OpRecord(start, op_head(0, ()) + native.record(), {})
            for native, outcome in zip(reports, simulation.outcomes[rank], strict=True)
            if isinstance(outcome, Report)
        )
        served, open_ops = (
            tuple(OpRecord(start, op_head(0, ()) + native.record(), {}) for native in of_kind[rank])
            for of_kind in (simulation.native.served, simulation.native.open)
        )
        dead = any(freeze.rank == rank and freeze.until_s is None for freeze in scenario.freezes)
        ranks[rank] = RankLedger(
            start, ops, notes, (), (), closed=not dead, served=served, open=open_ops if dead else ()
        )
    return Ledger(Path("simulated"), "run", ranks)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for each other give up soon."""
    monkeypatch.setattr(deliveries, "PATIENCE_S", 20.0)


def replay(
    simulation: Simulation, ledger: Ledger, note_input: Callable[..., None] = lambda *_: None
) -> dict[tuple[int, int], np.ndarray]:
    """The results by op and rank, from the inputs and the ledgers alone. ``note_input`` is told of what each
    rank enters with."""
    script, exchange, scenario = Script(ledger), MemoryExchange(), simulation.scenario
    results: dict[tuple[int, int], np.ndarray] = {}
    residues: dict[tuple[int, int], np.ndarray] = {}

    def residue_of(seq: int, rank: int) -> np.ndarray | None:
        if not scenario.carries_coding:
            return None
        place = (rank, seq % scenario.buckets)
        return residues.setdefault(place, np.zeros_like(simulation.inputs[seq][rank]))

    def play(player: Player) -> None:
        rank, flying = player.rank, deque[OpRecord]()
        for recorded in script.ranks[rank].ops:
            if len(flying) == scenario.depth:
                land(player, flying.popleft())
            for seq in scenario.skips:
                if (seq, rank) in results and seq not in [record.seq for record in flying]:
                    player.skipped(seq, seq)
            bucket = simulation.inputs[recorded.seq][rank].copy()
            results[recorded.seq, rank] = bucket
            residue = residue_of(recorded.seq, rank)
            note_input(rank, recorded.seq, bucket, residue)
            assert player.begin(recorded.seq, bucket, tag_in(recorded.seq), residue) is recorded
            flying.append(recorded)
        killed_in = [seq for seq, op in script.ranks[rank].unended.items() if op.entered]
        unended = {seq: simulation.inputs[seq][rank].copy() for seq in killed_in}
        for seq, bucket in unended.items():
            while flying and len(flying) + len(unended) > scenario.depth:
                land(player, flying.popleft())
            assert player.begin(seq, bucket, tag_in(seq), residue_of(seq, rank)) is None
        while flying:
            land(player, flying.popleft())
        player.serve_rest()

    def tag_in(seq: int) -> int:
        return tag_of(scenario.loss_scales[seq] if scenario.loss_scales else 0.0)

    def land(player: Player, record: OpRecord) -> None:
        player.end(record, results[record.seq, record.rank])

    play_together([Player(script, rank, exchange) for rank in script.ranks], play)
    return results


def check(simulation: Simulation, notes: tuple[Note, ...] = ()) -> Ledger:
    ledger = ledger_of(simulation, notes)
    results = replay(simulation, ledger)
    assert results
    for (op, rank), bucket in results.items():
        was = simulation.results[op][rank]
        assert np.array_equal(bucket.view(np.uint32), was.view(np.uint32)), f"op {op} at rank {rank}"
    return ledger


BAD = Scenario(
    ranks=4,
    length=30_000,
    ops=24,
    buckets=2,
    depth=2,
    codec="planes",
    planes=5,
    record=True,
    loss=0.05,
    trim=0.1,
    trim_bytes=256,
    resend=False,
    deadline_s=0.02,
)


COMPUTE = [[0.002 + 0.003 * ((7 * op + 3 * rank) % 5 == 0) for rank in range(4)] for op in range(24)]
"""Every now and then a rank computes for longer than the others."""

CASES: dict[str, dict[str, Any]] = {
    "loss and trimming": {},
    "lost packets are sent again": {"resend": True, "loss": 0.1, "deadline_s": 0.006, "ops": 40},
    "late is discarded": {"late": "discard"},
    "buckets without keys": {"buckets": 0},
    "nothing is lost": {"loss": 0.0, "trim": 0.0},
    "a rank stands still": {"freezes": [Freeze(1, 0.05, 0.15)], "compute_s": COMPUTE},
    "a program stands still": {"hangs": [Hang(2, 0.03, 0.2)], "compute_s": COMPUTE, "resend": True},
    "planes are adapted": {"steering": True, "planes": 0, "compute_s": COMPUTE},
    "steps are skipped and loss scales change": {
        "skips": [5, 9, 10],
        "loss_scales": [2.0 ** (8 + op % 3) for op in range(24)],
        "compute_s": COMPUTE,
        "deadline_s": 0.008,
    },
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_run_has_the_same_bits_again(codec: str, case: str, seed: int) -> None:
    ledger = check(simulate(replace(BAD, codec=codec, seed=seed, **CASES[case])))
    stages = (op.report for rank in ledger.ranks.values() for op in rank.ops)
    missing = sum(report.scatter.missing + report.gather.missing for report in stages)
    assert (missing > 0) == (case != "nothing is lost")


@pytest.mark.parametrize("dies_s", [0.032, 0.0401, 0.0517, 0.0633, 0.33])
@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_run_in_which_a_rank_died_has_the_same_bits_again(codec: str, dies_s: float) -> None:
    """Others have used what it decided in ops that it had not ended."""
    scenario = replace(
        BAD,
        codec=codec,
        ops=60,
        epochs=True,
        compute_s=[[0.003 if dies_s < 0.3 else 0.02] * 4] * 60,
        freezes=[Freeze(2, dies_s, None)],
    )
    epochs: dict[int, Note] = {}
    simulation = simulate_with_epochs(scenario, epochs)
    ledger = check(simulation, tuple(epochs.values()))
    assert epochs[1].values["members"] == (0, 1, 3)  # another may follow when the first ones are done
    dead = ledger.ranks[2]
    assert len(dead.ops) < 30
    assert ledger.ranks[0].ops[-1].report.epoch == 1
    if dies_s < 0.3:
        used = [op.seq for op in dead.open if any(uses_mean_of(ledger, op, rank) for rank in (0, 1, 3))]
        assert used


def overtaken(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Simulation, tuple[Note, ...]]:
    """An epoch begins with an op that ranks are in: who hears of it gives the op up. Residues are left out,
    because who jumps drops its own, which ``replay`` does not do."""
    monkeypatch.setattr(epochs_policy, "AHEAD_OPS", 0)
    compute_s = 0.003 * np.exp(0.8 * np.random.default_rng(seed).standard_normal((60, 4)))
    dies = Freeze(2, 0.03 + 0.002 * (seed % 17), None)
    scenario = replace(
        BAD,
        seed=seed,
        ops=60,
        epochs=True,
        compute_s=compute_s.tolist(),
        freezes=[dies],
        residue="discard",
    )
    epochs: dict[int, Note] = {}
    return simulate_with_epochs(scenario, epochs), tuple(epochs.values())


def test_a_contribution_to_an_op_that_was_given_up_is_given_to_those_who_had_used_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(check(*overtaken(104, monkeypatch)))
    given_up = [op for own in script.ranks.values() for op in own.ops if op.voided]
    assert any(own.needs_contribution(op.seq, op.rank) for op in given_up for own in script.ranks.values())


@pytest.mark.parametrize("seed", [3, 13, 29])
def test_a_mean_that_was_used_before_its_owner_gave_the_op_up_is_named(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, notes = overtaken(seed, monkeypatch)
    with pytest.raises(ReplayError, match=r"used the mean of rank \d in op \d+ in epoch 0, and rank \d then"):
        replay(simulation, ledger_of(simulation, notes))


def uses_mean_of(ledger: Ledger, op: OpRecord, rank: int) -> bool:
    """Whether a rank had some of the mean of this op's owner."""
    record = ledger.ranks[rank].by_seq[op.seq]
    return not record.voided and bool(record.fates.answered[op.own_shard])


def simulate_with_epochs(scenario: Scenario, epochs: dict[int, Note]) -> Simulation:
    """Notes the epochs that were agreed on, as ledgers do."""
    step = Agreement.step

    def noting(agreement: Agreement, *arguments: Any) -> Step:
        found = step(agreement, *arguments)
        for epoch in found.epochs:
            epochs[epoch.number] = Note("epoch", vars(epoch))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agreement, "step", noting)
        return simulate(scenario)


def test_a_mean_of_which_its_owner_died_without_a_record_is_named() -> None:
    simulation = simulate(replace(BAD, ops=8))
    ledger = ledger_of(simulation)
    died = replace(ledger.ranks[2], ops=ledger.ranks[2].ops[:4], closed=False)
    with pytest.raises(ReplayError, match=r"used the .* of rank 2 (in|to) op \d, of which rank 2 has no"):
        replay(simulation, Ledger(ledger.directory, ledger.run, {**ledger.ranks, 2: died}))


def test_ranks_that_need_one_that_has_failed_end_and_say_why(tmp_path: Path) -> None:
    exchanges = [FileExchange(tmp_path / "meeting", rank, 2) for rank in range(2)]
    script = Script(ledger_of(simulate(replace(BAD, ranks=2, ops=2))))
    lock = threading.Lock()
    waiting = Deliveries(script, 0, exchanges[0], lock, lambda: False)
    lock.acquire()
    exchanges[1].put("0.scatter.1.0.whole", b"its last word")
    exchanges[1].leave(1, "no such file: data.bin")
    assert waiting.contribution(0, 1) == b"its last word"
    with pytest.raises(ReplayError, match=r"of rank 1 to op 1 in vain: rank 1 has ended \(no such file"):
        waiting.contribution(1, 1)
    exchanges[0].leave(0, "that was all")
    assert not (tmp_path / "meeting").exists()  # the last one to leave has cleaned up


def test_a_rank_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    exchange = FileExchange(tmp_path, 0, 2)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        (tmp_path / "here.1").write_text(str(process.pid))
    assert exchange.why_left(1) == "its process was killed"
    assert exchange.why_left(0) is None


@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_single_op_is_computed_again_from_its_file(codec: str, tmp_path: Path) -> None:
    scenario = replace(BAD, codec=codec, compute_s=COMPUTE, deadline_s=0.004)
    simulation = simulate(scenario)
    ledger = ledger_of(simulation)
    script = Script(ledger)
    late = (entry for own in script.ranks.values() for entry in own.late.items())
    seq = max(seq for seq, of_op in late if any(parts.stage == "scatter" for parts in of_op))
    assert len(single.ops_behind(script, seq)) > 1
    dumps = {rank: single.Dump(tmp_path / "op", seq, script, rank) for rank in script.ranks}
    replay(simulation, ledger, lambda rank, *entered: dumps[rank].note_input(*entered))
    for rank, dump in dumps.items():
        dump.write(simulation.results[seq][rank])
    single.join(tmp_path / "op", script.ranks)
    stored = single.read(tmp_path / "op")
    results = stored.again()
    for rank, was in stored.outputs.items():
        assert results[rank].tobytes() == was.tobytes() == simulation.results[seq][rank].tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["op"]
    text = "\n".join(explain(stored.ledger, seq))
    assert "the mean of 3 of 4" in text
    assert re.search(r"plus rank \d's of op \d+ \(late\)", text)


def test_a_single_op_of_a_run_in_which_a_rank_died_is_computed_again(tmp_path: Path) -> None:
    """Both one in which it died, and others used what it had done, and one after its death."""
    compute_s = [[0.003] * 4] * 60
    freezes = [Freeze(2, 0.0517, None)]
    scenario = replace(BAD, ops=60, epochs=True, compute_s=compute_s, freezes=freezes, residue="discard")
    epochs: dict[int, Note] = {}
    simulation = simulate_with_epochs(scenario, epochs)
    ledger = ledger_of(simulation, tuple(epochs.values()))
    script, dead = Script(ledger), ledger.ranks[2]
    died_in = next(op.seq for op in dead.open if any(uses_mean_of(ledger, op, rank) for rank in (0, 1, 3)))
    for seq in (died_in, 50):
        for rank, own in script.ranks.items():
            dump = single.Dump(tmp_path / f"op{seq}", seq, script, rank)
            for entered in sorted(record.seq for record in own.by_seq.values() if record.entered):
                dump.note_input(entered, simulation.inputs[entered][rank], None)
            if rank != 2:
                dump.write(simulation.results[seq][rank])
        single.join(tmp_path / f"op{seq}", script.ranks)
        stored = single.read(tmp_path / f"op{seq}")
        assert sorted(stored.outputs) == [0, 1, 3]
        results = stored.again()
        for rank, was in stored.outputs.items():
            assert results[rank].tobytes() == was.tobytes()
        assert list(explain(stored.ledger, seq))


def test_what_is_no_stored_op_is_refused(tmp_path: Path) -> None:
    (tmp_path / "op").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is no op that was stored"):
        single.read(tmp_path / "op")


def test_a_fate_that_was_changed_is_found_at_its_op() -> None:
    simulation = simulate(replace(BAD, trim=0.0))
    ledger = ledger_of(simulation)
    record = next(op for op in ledger.ranks[2].ops if op.seq >= 9 and op.fates.contributions[1])
    came = record.fates.contributions[1]
    changed = replace(
        record.fates,
        contributions=(record.fates.contributions[0], came[:-1], *record.fates.contributions[2:]),
    )
    vars(record)["_read"] = (*record._read[:4], changed)
    with pytest.raises(ReplayError, match=rf"parts from the record at op {record.seq} .* found by rank 2"):
        replay(simulation, ledger)


def test_other_gradients_are_found_at_their_op() -> None:
    simulation = simulate(BAD)
    ledger = ledger_of(simulation)
    simulation.inputs[7][3][:] += 1.0
    with pytest.raises(ReplayError, match=r"parts from the record at op 7 .*the gradients of this op differ"):
        replay(simulation, ledger)


def test_a_rank_that_is_missing_is_refused_by_name() -> None:
    ledger = ledger_of(simulate(replace(BAD, ops=2)))
    with pytest.raises(ConfigError, match="the ledgers of ranks 2 are missing"):
        Script(Ledger(ledger.directory, ledger.run, {r: ledger.ranks[r] for r in (0, 1, 3)}))


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))),
)
def test_runs_without_others_are_what_sets_say(
    some: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    def runs(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        granules = {g for a, b in pairs for g in range(min(a, b), max(a, b))}
        edges = [g for g in range(32) if (g in granules) != (g - 1 in granules)]
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    def members(of: tuple[tuple[int, int], ...]) -> set[int]:
        return {g for first, last in of for g in range(first, last)}

    assert members(without(runs(some), runs(others))) == members(runs(some)) - members(runs(others))
