#!/usr/bin/env python3
"""Replay, shown: DDP trains on a testbed with loss, trimming and a rank that freezes or dies, then again.

Each case is recorded once for each seed, then replayed from its ledgers. The digests of the parameters and of
the optimizer must be alike after every step, on every rank. Needs root for the testbed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tailcut import Config

TAILCUT = str(Path(sys.executable).with_name("tailcut"))

SCENARIO = """\
hosts = 4
seed = {seed}

[switch]
loss_frac = 0.05
trim_frac = 0.1
{more}
"""
FREEZE = "[[freezes]]\nhost = 1\nat_s = 9.0\nfor_s = 0.4\nevery_s = 3.0\n"
KILL = "[[kills]]\nhost = 2\nat_s = 40.0\n"

# Without resending, a rank that has stood still lacks means when it catches up. It goes on without them, so
# that its replica stays another one than the others.
SETTINGS: dict[str, Any] = {
    "drift_bound": 0,
    "resend": False,
    "trim_bytes": 256,
    "deadline_s": 0.2,
    "rejoin": False,
}
DEFAULTS = {name: getattr(Config(), name) for name in ("drift_bound", "resend", "deadline_s", "rejoin")}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "freeze": (FREEZE, {"codec": "planes", "planes": 5}),
    "raw": (FREEZE, {"codec": "raw"}),
    "adapted": (FREEZE, {"codec": "planes", "planes": 0}),
    "resend": (FREEZE, {"codec": "planes", "planes": 0, "resend": True}),
    "death": (FREEZE + KILL, {"codec": "planes", "planes": 5}),
    "defaults": (FREEZE, DEFAULTS),
}


def train(directory: Path, steps: int, settings: dict[str, Any]) -> None:
    """One rank; the same for a run and for its replay."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import tailcut

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    attachment = tailcut.attach(ddp, optimizer=optimizer, **settings)
    digests: dict[int, str] = {}
    while attachment.step < steps:
        generator = torch.Generator().manual_seed(1000 * attachment.step + rank)
        optimizer.zero_grad()
        outputs = ddp(torch.randn(64, 128, generator=generator))
        nn.functional.mse_loss(outputs, torch.randn(64, 10, generator=generator)).backward()
        optimizer.step()
        together = hashlib.sha256()
        for parameter in ddp.parameters():
            for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
                together.update(tensor.numpy().tobytes() if torch.is_tensor(tensor) else b"")
        digests[attachment.step] = together.hexdigest()
        (directory / f"{rank}.json").write_text(json.dumps(digests))
    attachment.close()


def command(directory: Path, steps: int, settings: dict[str, Any]) -> list[str]:
    return [sys.executable, __file__, "--train", str(directory), str(steps), json.dumps(settings)]


def case(name: str, seed: int, steps: int, place: Path) -> str:
    """What came of one run and its replay, in words."""
    more, given = CASES[name]
    settings = {**SETTINGS, **given, "seed": seed}
    scenario, ledger, was, again = (place / part for part in ("s.toml", "ledger", "was", "again"))
    scenario.write_text(SCENARIO.format(seed=seed, more=more))
    was.mkdir()
    again.mkdir()
    env = os.environ | {"TAILCUT_LEDGER": str(ledger)}
    run = [TAILCUT, "testbed", "run", "--no-measure", str(scenario), "--", *command(was, steps, settings)]
    recorded = subprocess.run(run, env=env, capture_output=True, text=True, check=False)
    if recorded.returncode:
        return f"the run failed: {recorded.stderr[-1500:]}"
    replay = [TAILCUT, "replay", str(ledger), "--", *command(again, steps, settings)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    replayed = subprocess.run(replay, env=env, capture_output=True, text=True, check=False)
    alike = [(_digests(was, rank), _digests(again, rank)) for rank in range(4)]
    steps_alike = [sum(a.get(step) == b.get(step) for step in a) for a, b in alike]
    verdict = "ALIKE" if all(a == b and a for a, b in alike) else f"DIFFER: {replayed.stderr[-1500:]}"
    return f"{verdict}; steps alike by rank: {steps_alike}; {_about(ledger)}"


def _digests(directory: Path, rank: int) -> dict[str, str]:
    digests: dict[str, str] = json.loads((directory / f"{rank}.json").read_text())
    return digests


def _about(place: Path) -> str:
    """What the run went through."""
    from tailcut import Ledger

    ledger = Ledger.open(place)
    ops = [op for rank in ledger.ranks.values() for op in rank.ops]
    lost = sum(op.report.lost_frac for op in ops) / len(ops)
    trimmed = sum(cut.times for op in ops for cut in op.fates.cuts)
    late = sum(len(op.fates.uses) for op in ops)
    planes = sorted({op.report.scatter.planes for op in ops})
    events = Counter(note.event for rank in ledger.ranks.values() for note in rank.notes)
    return (
        f"lost {lost:.1%}, {trimmed} packets trimmed, {late} late parts taken in, planes {planes}, "
        f"{events['skipped step']} steps skipped, {events['correction']} blocks corrected, "
        f"{events['rejoin']} rejoins"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--train", nargs=3, metavar=("DIRECTORY", "STEPS", "SETTINGS"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.train:
        train(Path(options.train[0]), int(options.train[1]), json.loads(options.train[2]))
        return 0
    failed = 0
    for name in options.cases.split(","):
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as place:
                outcome = case(name, seed, options.steps, Path(place))
            failed += not outcome.startswith("ALIKE")
            print(f"{name}, seed {seed}, {options.steps} steps: {outcome}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
