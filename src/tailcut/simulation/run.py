"""Runs the real protocol core in virtual time: a scenario gives results and reports, always the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tailcut import _native
from tailcut.codec import CODEC_IDS, trimmed_payload_bytes
from tailcut.engine.loss_scale import tag_of
from tailcut.errors import TailcutError
from tailcut.grid import GridLayout
from tailcut.policy.deadline import fixed_bounds
from tailcut.policy.epoch_values import Epoch
from tailcut.policy.epochs import Agreement, Step
from tailcut.policy.grid import COLUMN_SHARE, GridSteering
from tailcut.report import Report, outcome_of
from tailcut.simulation.network import ns
from tailcut.simulation.scenario import Array, Scenario


class Policy(Protocol):
    """Decides for one rank. It is asked at each entry and told of each report."""

    def terms(self, length: int) -> _native.Terms: ...

    def after(self, report: Report, now_s: float) -> object: ...


@dataclass(frozen=True)
class Simulation:
    """What a simulated run gave."""

    scenario: Scenario
    inputs: list[list[Array]]
    """[op][rank]: the buckets before the op."""
    results: list[list[Array]]
    """[op][rank]: the buckets after the op. A rank that did not take part has its bucket as it was."""
    outcomes: list[list[Report | TailcutError]]
    """[rank]: its reports and errors, in the order in which its ops ended."""
    ended_s: float
    native: _native.SimResult

    def reports(self, rank: int) -> list[Report]:
        return [outcome for outcome in self.outcomes[rank] if isinstance(outcome, Report)]


def simulate(
    scenario: Scenario,
    inputs: list[list[Array]] | None = None,
    policies: Sequence[Policy] | None = None,
) -> Simulation:
    """Run it. ``inputs[op][rank]`` replaces the seeded buckets, ``policies[rank]`` decides for a rank."""
    if inputs is None and scenario.elided:
        inputs = elided_buckets(scenario)
    if inputs is None:
        inputs = [[scenario.bucket(op, rank) for rank in range(scenario.ranks)] for op in range(scenario.ops)]
    results = inputs if scenario.elided else [[bucket.copy() for bucket in op] for op in inputs]
    native = _native.simulate(spec_of(scenario, policies), results)
    grid = GridLayout(scenario.ranks, scenario.rows)
    outcomes = [
        [outcome_of(report, grid, rank) for report in reports] for rank, reports in enumerate(native.reports)
    ]
    return Simulation(scenario, inputs, results, outcomes, native.ended_at_ns / 1e9, native)


def elided_buckets(scenario: Scenario) -> list[list[Array]]:
    """Buckets of the right lengths that share one piece of memory, because nobody reads their values."""
    longest = max([scenario.length, *scenario.lengths.values()])
    zeros = np.zeros(longest, np.float32)
    return [
        [zeros[: scenario.length_of(op, rank)] for rank in range(scenario.ranks)]
        for op in range(scenario.ops)
    ]


def spec_of(scenario: Scenario, policies: Sequence[Policy] | None = None) -> _native.SimSpec:
    """The scenario as the native simulation takes it."""
    spec = _native.SimSpec()
    scenario.fill(spec)
    for name in (
        *("ranks", "rows", "socket_buffer_bytes", "pool_bytes", "window_ops", "first_seq", "depth"),
        *("record", "elided", "resend", "paced", "multicast", "stand_in", "attendance"),
    ):
        setattr(spec, name, getattr(scenario, name))
    spec.buckets = scenario.buckets
    spec.carry = scenario.late == "carry"
    spec.residues = scenario.carries_coding
    spec.deaf = list(scenario.deaf)
    for first, count in scenario.reliable:
        spec.rely(first, count)
    spec.payload_bytes = scenario.packet_bytes
    spec.codec = CODEC_IDS[scenario.codec]
    spec.trim_payload_bytes = trimmed_payload_bytes(scenario.trim_bytes)
    spec.terms = _native.Terms(fixed_bounds(scenario.deadline_s), scenario.planes or 16).with_column(
        fixed_bounds(COLUMN_SHARE * scenario.deadline_s)
    )
    spec.planes_by_rank = [
        scenario.planes_by_rank.get(rank, scenario.planes) or 16 for rank in range(scenario.ranks)
    ]
    spec.linger_ns = ns(scenario.deadline_s)
    spec.compute_ns = [[ns(s) for s in row] for row in scenario.compute_s] or [
        [0] * scenario.ranks
    ] * scenario.ops
    spec.ops_by_rank = [scenario.ops_by_rank.get(rank, scenario.ops) for rank in range(scenario.ranks)]
    spec.resync_before = [scenario.resync_before.get(rank, 1 << 62) for rank in range(scenario.ranks)]
    spec.loss_scale_tags = [tag_of(scale) for scale in scenario.loss_scales]
    spec.skips = sorted(scenario.skips)
    for freeze in scenario.freezes:
        until_ns = None if freeze.until_s is None else ns(freeze.until_s)
        spec.freeze(freeze.rank, ns(freeze.from_s), until_ns)
    for hang in scenario.hangs:
        spec.hang(hang.rank, ns(hang.from_s), ns(hang.until_s), hang.announced)
    for at_s, destination, datagram in scenario.injections:
        spec.inject(ns(at_s), destination, datagram)
    if policies is None and scenario.steering:
        policies = _steering(scenario)
    if scenario.epochs:
        _let_agree(spec, scenario)
    if policies is not None:
        _let_decide(spec, policies, GridLayout(scenario.ranks, scenario.rows))
    return spec


def _steering(scenario: Scenario) -> list[Policy]:
    return [
        GridSteering(
            rank=rank,
            grid=GridLayout(scenario.ranks, scenario.rows),
            deadline_s=scenario.deadline_s,
            planes=scenario.planes_by_rank.get(rank, scenario.planes) if scenario.codec == "planes" else 16,
            budget=scenario.budget,
            trimmable=scenario.trim_bytes > 0,
            carries=scenario.late == "carry" and scenario.buckets > 0,
            carries_coding=scenario.carries_coding,
        )
        for rank in range(scenario.ranks)
    ]


def _let_agree(spec: _native.SimSpec, scenario: Scenario) -> None:
    grid = GridLayout(scenario.ranks, scenario.rows)
    agreements = [Agreement(rank, grid, pause_s=0.0) for rank in range(scenario.ranks)]
    store: dict[str, bytes] = {}

    def agree(rank: int, now_ns: int, report: _native.OpReport) -> list[_native.Epoch]:
        outcome, agreement = outcome_of(report, grid, rank), agreements[rank]
        if not isinstance(outcome, Report) or outcome.status == "behind":
            return []
        agreement.after(outcome, now_ns / 1e9, outcome.seq + scenario.depth)
        epochs: list[Epoch] = []
        while now_ns / 1e9 < scenario.store_until_s and agreement.look_at_s() is not None:
            step = _look(agreement, now_ns / 1e9, store)
            epochs += step.epochs
            if not (step.epochs or step.proposal):
                break
        return [_native.Epoch(e.number, e.first_seqs[0], e.weights, e.members) for e in epochs]

    spec.agree = agree


def _look(agreement: Agreement, now_s: float, store: dict[str, bytes]) -> Step:
    """One look into the store, and what follows from it there."""
    step = agreement.step(now_s, {key: store.get(key) for key in agreement.wanted()})
    store.update({key: vote.encode() for key, vote in step.votes.items()})
    if step.proposal:
        store.setdefault(step.proposal[0], step.proposal[1].encode())
    return step


def _let_decide(spec: _native.SimSpec, policies: Sequence[Policy], grid: GridLayout) -> None:
    def decide(rank: int, now_ns: int, bucket_len: int) -> _native.Terms:
        return policies[rank].terms(bucket_len)

    def observe(rank: int, now_ns: int, report: _native.OpReport) -> None:
        outcome = outcome_of(report, grid, rank, key=report.bucket_len)
        if isinstance(outcome, Report):
            policies[rank].after(outcome, now_ns / 1e9)

    spec.decide, spec.observe = decide, observe
