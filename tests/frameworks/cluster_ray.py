"""Ray Train on a local cluster: through tailcut and without, a worker that fails, and one that freezes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import tailcut
from tailcut.ray import Reporter

WORKERS = 2
REPORT_EVERY = 10


class WritesReports(UserCallback):
    """Keeps of every report which step each worker has reported."""

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        with Path(os.environ["RESULTS"], "reports").open("a") as file:
            print(json.dumps([worker.get("step") for worker in metrics]), file=file)


def _steps(
    steps: int,
    through_tailcut: bool,
    settings: dict[str, Any],
    watch: Any = None,
    reporter: Reporter | None = None,
) -> tuple[Any, Any]:
    from tests.training.common import loss_of, perceptron  # Ray has set RANK by now

    model = prepare_model(perceptron(256))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    attachment = tailcut.attach(model, optimizer=optimizer, **settings) if through_tailcut else None
    step = 0
    while step < steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        step = attachment.step if attachment is not None else step + 1
        if reporter is not None:
            reporter.step(step, {})
        if watch is not None:
            watch.step()
    return model, attachment


def _write(loop: str, results: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    Path(os.environ["RESULTS"], f"{loop}-{rank}.json").write_text(json.dumps(results))


def train(_: dict[str, Any]) -> None:
    """All in one, because a group of workers takes long to start. Its first life fails."""
    mark = Path(os.environ["RESULTS"], "failed")
    if not mark.exists():
        fail(mark)
    equal()
    frozen()
    ray.train.report({"done": 1})


def fail(mark: Path) -> None:
    """Worker 1 ends in the middle, and Ray then starts all of them again."""
    _steps(3, True, {"deadline_s": 5})
    if ray.train.get_context().get_world_rank() == 1:
        mark.write_text("")
        os._exit(1)
    dist.barrier()


def equal() -> None:
    from tests.training.common import values

    plain, _ = _steps(6, False, {})
    ours, attachment = _steps(6, True, {"deadline_s": 60})
    ops = attachment.stats().ops
    attachment.close()
    _write("equal", {"difference": float((values(plain) - values(ours)).abs().max()), "ops": ops})


def frozen() -> None:
    from tests.frameworks.checks import DEADLINE_S
    from tests.frameworks.common import Watch
    from tests.training.common import digest

    watch, reporter = Watch(freeze=True), Reporter(REPORT_EVERY)
    model, attachment = _steps(150, True, {"deadline_s": DEADLINE_S}, watch, reporter)
    attachment.before_checkpoint()
    reporter.close()
    skipped = attachment.stats().skipped_steps
    attachment.close()
    _write("frozen", {**watch.result(), "skipped": skipped, "digest": digest(*model.parameters())})


if __name__ == "__main__":
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, logging_level="ERROR")
    TorchTrainer(
        train,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            storage_path=str(Path("storage").absolute()),
            failure_config=FailureConfig(max_failures=1),
            callbacks=[WritesReports()],
        ),
    ).fit()
    ray.shutdown()
