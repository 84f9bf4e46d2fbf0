"""One rank of a cell. It trains as the order beside it says, tells its progress, and writes its result.

RANK=0 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=... python -m tailcut.tools.race.worker ORDER.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tailcut.pytorch.racer import LastStep, Racer, join
from tailcut.pytorch.workloads import load
from tailcut.tools.race.figures import reached_s
from tailcut.tools.race.progress import BEGUN, ProgressWriter, stream_of

WARMUP_STEPS = 10
"""These steps are not timed. They cover the rebuild of DDP's buckets and the first steps of PowerSGD."""
EVALUATION = ("step", "at_s", "figure")
STOP_AHEAD_STEPS = 5
"""Rank 0 announces the last step this many steps ahead, so that all ranks know when they get there."""


def race(racer: Racer, last: LastStep, order: dict[str, Any], rank: int, progress: ProgressWriter) -> None:
    """The timed steps. Rank 0 evaluates between its own, and the others go on as far as they can."""
    start_s = time.perf_counter()
    evaluations: list[tuple[int, float, float]] = []
    evaluate_at_s = order["eval_every_s"]
    while True:
        before_s = time.perf_counter()
        loss = racer.step()
        after_s = time.perf_counter()
        number = racer.steps - WARMUP_STEPS
        at_s = after_s - start_s
        ops_s = [round(op_s, 5) for op_s in racer.take_op_times_s()]
        progress.say(
            step=number,
            at_s=round(at_s, 5),
            step_s=round(after_s - before_s, 5),
            loss=loss,
            **({"ops_s": ops_s} if ops_s else {}),
        )
        ends = last.number is not None and number >= last.number
        if rank == 0:
            if ends or at_s >= evaluate_at_s:
                evaluate_at_s = at_s + order["eval_every_s"]
                evaluations.append((number, round(at_s, 5), racer.evaluate()))
                progress.say(**dict(zip(EVALUATION, evaluations[-1], strict=True)), **spent(racer))
            at_s = time.perf_counter() - start_s
            over = at_s * (1 + STOP_AHEAD_STEPS / number) >= order["seconds"]
            if last.number is None and (over or there(racer, order, evaluations)):
                last.decide(number + STOP_AHEAD_STEPS)
        if ends:
            return


def there(racer: Racer, order: dict[str, Any], evaluations: list[tuple[int, float, float]]) -> bool:
    """Whether training may end because the figure is where it ends."""
    stop_at, better = order["stop_at"], racer.workload.higher_is_better
    return stop_at is not None and reached_s(evaluations, stop_at, better) is not None


def spent(racer: Racer) -> dict[str, float]:
    stats = racer.stats()
    if stats is None:
        return {}
    return {"spent": stats.epsilon.total, "budget": stats.budget, "lost_frac": stats.lost_frac}


def result_of(racer: Racer, order: dict[str, Any], rank: int) -> dict[str, Any]:
    """What RANK.json holds: a fingerprint of the replica after all were made equal, rank 0's figure, and of
    tailcut its stats, its configuration and its links: by source, what was to come and what was late."""
    result: dict[str, Any] = {}
    if stats := racer.stats():
        result |= {"stats": stats.to_dict(), "stats_text": str(stats), "links": racer.links}
    if racer.config:
        result["config"] = asdict(racer.config)
    if order["all_live"]:  # what follows waits for every rank
        racer.make_equal()
        racer.barrier()
        result["parameters"] = racer.fingerprint()
    racer.close()
    if rank == 0:
        result["figure"] = racer.evaluate(whole=True)
    return result


def main(order_file: Path) -> None:
    order = json.loads(order_file.read_text())
    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = join(rank, ranks, os.environ["MASTER_ADDR"], port)
    data, checkpoint = (Path(order[name]) if order[name] else None for name in ("data", "checkpoint"))
    workload = load(order["workload"], data, checkpoint)
    directory = order_file.parent
    progress = ProgressWriter(stream_of(rank, directory))
    racer = Racer(
        workload, order["kind"], order["config"], order["seed"], measured_deadline=order["measured_deadline"]
    )
    while racer.steps < WARMUP_STEPS:
        racer.step()
    if order["steps"]:
        racer.anneal(order["steps"])
    last = LastStep(rank, store, order["steps"])
    racer.barrier()
    if rank == 0:
        progress.say(facts=asdict(workload.facts()))
        (directory / BEGUN).touch()
    race(racer, last, order, rank, progress)
    progress.close()
    part = directory / f"{rank}.part"
    part.write_text(json.dumps(result_of(racer, order, rank)))
    part.rename(directory / f"{rank}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
