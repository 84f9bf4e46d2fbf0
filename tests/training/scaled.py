"""Training with a GradScaler, and an Inf or a NaN on one rank every so often."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import tailcut
from tailcut import Config, Report
from tests.training.common import (
    PATIENT,
    RANK,
    RANKS,
    Cases,
    heard_warnings,
    loss_of,
    perceptron,
    replica_digest,
)

case = Cases()
STEPS = 40


def train(config: Config, make: Any, known: bool = True, passes: int = 1) -> dict[str, Any]:
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = make(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    attachment = tailcut.attach(ddp, config, optimizer if known else None, scaler=scaler)
    assert attachment._reducer is not None
    group = attachment._reducer.group
    told: list[int] = []
    skipped = group.skipped

    def noted(reports: list[Report]) -> None:
        told.append(len(reports))
        skipped(reports)

    group.skipped = noted  # type: ignore[method-assign,assignment]
    scales, ops = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(passes):
            loss = loss_of(ddp, passes * step + index)
            if step % 5 == 4 and step % RANKS == RANK and index == 0:
                loss = loss * (torch.inf if step % 2 else torch.nan)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        ops.append(len({report.key for report in attachment.reports}))
    stats = attachment.stats()
    attachment.close()
    return {
        "scales": scales,
        "digest": replica_digest(ddp, optimizer),
        "finite": all(bool(p.isfinite().all()) for p in ddp.parameters()),
        "told": [count for count in told if count],
        "buckets": ops[-1],
        "split_verdicts": stats.split_verdicts,
    }


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@case
def calm() -> dict[str, Any]:
    return train(PATIENT, sgd)


@case
def optimizer_unknown() -> dict[str, Any]:
    return train(PATIENT, sgd, known=False)


@case
def two_passes_a_step() -> dict[str, Any]:
    return train(PATIENT, sgd, passes=2)


@case
def fused() -> dict[str, Any]:
    return train(PATIENT, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True))


@case
def two_lanes() -> dict[str, Any]:
    return train(replace(PATIENT, lanes=2), sgd)


def warnings_of(late: str) -> dict[str, Any]:
    ddp = DistributedDataParallel(perceptron())
    attachment = tailcut.attach(ddp, Config(deadline_s=60.0, late=late))
    loss_of(ddp, 0).backward()
    report = attachment.reports[-1]
    told = {}
    for name, changed in {
        "of_split_verdicts": replace(report, split_verdicts=1),
        "of_missing_parts": replace(report, gather=report.gather._replace(missing=64)),
    }.items():
        with heard_warnings() as told[name]:
            attachment._listen(changed)
            attachment._listen(changed)
    attachment.close()
    return told


@case
def warnings_with_carry() -> dict[str, Any]:
    return warnings_of("carry")


@case
def warnings_with_discard() -> dict[str, Any]:
    return warnings_of("discard")


if __name__ == "__main__":
    case.run(sys.argv[1:])
