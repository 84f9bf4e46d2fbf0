"""Lightning under torchrun: through tailcut in several ways, compared with plain DDP, or with a freeze."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.utilities.distributed import _sync_ddp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

import tailcut
from tailcut import Config
from tailcut.lightning import TailcutCallback, TailcutStrategy
from tests.frameworks.checks import DEADLINE_S
from tests.frameworks.common import BATCH, Watch, examples, loader
from tests.training.common import PATIENT, RANKS, digest, perceptron, report, say, values

warnings.filterwarnings("ignore", module="lightning")
STEPS = 6


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(256)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Timing(Callback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_end(self, *_: Any) -> None:
        self.watch.step()


def trainer(strategy: Any, *callbacks: Callback, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    usual = {"max_epochs": 1, "logger": False, "devices": RANKS, "use_distributed_sampler": False}
    return Trainer(
        accelerator="cpu", strategy=strategy, callbacks=list(callbacks), **{**quiet, **usual, **options}
    )


def fitted(strategy: Any, *callbacks: Callback, steps: int = STEPS, **options: Any) -> Regression:
    model = Regression()
    trainer(strategy, *callbacks, **options).fit(model, loader(steps))
    return model


def compared(**options: Any) -> dict[str, Any]:
    plain = fitted(DDPStrategy(), **options)
    strategy = TailcutStrategy(PATIENT)
    ours = fitted(strategy, **options)
    assert strategy.attachment is not None
    return {
        "difference": float((values(plain) - values(ours)).abs().max()),
        "ops": strategy.attachment.stats().ops,
    }


def equal() -> dict[str, Any]:
    return {
        "plain": compared(),
        "bf16-mixed": compared(precision="bf16-mixed"),
        "accumulation": compared(accumulate_grad_batches=2),
        "clipping": compared(gradient_clip_val=0.1),
    }


def whole() -> dict[str, Any]:
    """Callback, logged figures, validation, checkpoints, a second fit, Fabric."""
    callback = TailcutCallback(PATIENT)
    logger = CSVLogger("logs", flush_logs_every_n_steps=1)
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 2, "enable_checkpointing": True}
    run = trainer("ddp", callback, ModelCheckpoint("saved", save_last=True), **options)
    model = Regression()
    run.fit(model, loader(STEPS), loader(2))
    assert callback.attachment is not None
    first = callback.attachment.stats().ops
    resynced = callback.attachment._passes.step
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(STEPS), loader(2))
    metrics = Path(logger.log_dir, "metrics.csv")
    head = metrics.read_text().splitlines()[0] if metrics.exists() else ""
    return {
        "first_ops": first,
        "steps": resynced,
        "second_ops": callback.attachment.stats().ops,
        "validated": {name: float(v) for name, v in run.validate(model, loader(2), verbose=False)[0].items()},
        "columns": head.split(","),
        "saved": sorted(path.name for path in Path("saved").glob("*")),
        "digest": digest(*model.parameters()),
        "fabric_ops": fabric(),
        "integers": mean_of_integers(),
    }


def fabric() -> int:
    run = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    run.launch()
    plain = perceptron()
    model, optimizer = run.setup(plain, torch.optim.SGD(plain.parameters(), 0.1))
    with tailcut.attach(model, PATIENT, optimizer) as attachment:
        for inputs, targets in loader(STEPS):
            optimizer.zero_grad()
            run.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
        return attachment.stats().ops


def mean_of_integers() -> float:
    """As ``self.log(..., sync_dist=True)`` takes it where the backend is not Gloo."""
    group = dist.new_group(backend="tailcut")
    return float(_sync_ddp(torch.tensor(BATCH), group, "mean"))


def frozen() -> dict[str, Any]:
    """One rank freezes, and the others go on."""
    watch = Watch(freeze=True)
    strategy = TailcutStrategy(Config(deadline_s=DEADLINE_S))
    model = fitted(strategy, Timing(watch), steps=150)
    assert strategy.attachment is not None
    skipped = strategy.attachment.stats().skipped_steps
    return {**watch.result(), "skipped": skipped, "digest": digest(*model.parameters())}


class SaysThatItTrains(Callback):
    def on_train_batch_end(self, run: Trainer, *_: Any) -> None:
        if run.global_step == 3:
            say("training")


def endless() -> dict[str, Any]:
    """Only a signal ends it."""
    fitted(TailcutStrategy(PATIENT), SaysThatItTrains(), steps=STEPS, max_epochs=-1)
    return {}


class WritesOps(Callback):
    def on_train_end(self, run: Trainer, *_: Any) -> None:
        strategy: Any = run.strategy
        Path(f"spawned-{run.global_rank}").write_text(str(strategy.attachment.stats().ops))


def spawned() -> dict[str, Any]:
    """Lightning starts the processes by itself."""
    model, data = Regression(), DataLoader(examples(2 * STEPS), BATCH)
    strategy = TailcutStrategy(PATIENT, start_method="spawn")
    trainer(strategy, WritesOps(), devices=2, use_distributed_sampler=True).fit(model, data)
    return {}


if __name__ == "__main__":
    torch.set_num_threads(1)
    ways = (equal, frozen, whole, endless, spawned)
    report({way: {found.__name__: found for found in ways}[way]() for way in sys.argv[1:]})
