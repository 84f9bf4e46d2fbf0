"""A loop of Accelerate under torchrun: through tailcut and without, saved and loaded, or with a freeze."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import tailcut
from tailcut import Attachment, Config
from tests.frameworks.checks import DEADLINE_S
from tests.frameworks.common import BATCH, Watch, examples
from tests.training.common import PATIENT, digest, perceptron, refusal, replica_digest, report, values

STEPS = 6


def prepared(steps: int) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = perceptron(256)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return (accelerator, *accelerator.prepare(model, optimizer, DataLoader(examples(steps), BATCH)))


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, batches: Any, watch: Watch | None = None
) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if watch is not None:
            watch.step()


def begun(config: Config = PATIENT) -> tuple[Accelerator, Any, Any, Any, Attachment]:
    accelerator, model, optimizer, batches = prepared(STEPS)
    attachment = tailcut.attach(model, config, optimizer)
    accelerator.register_for_checkpointing(attachment)
    return accelerator, model, optimizer, batches, attachment


def equal() -> dict[str, Any]:
    accelerator, plain, optimizer, batches = prepared(STEPS)
    train(accelerator, plain, optimizer, batches)
    accelerator, ours, optimizer, batches, attachment = begun()
    train(accelerator, ours, optimizer, batches)
    ops = attachment.stats().ops
    attachment.before_checkpoint()
    accelerator.save_state("saved")
    attachment.close()
    again, loaded, optimizer_again, _, attachment_again = begun()
    again.load_state("saved")
    counted = attachment_again.stats().ops
    attachment_again.close()
    return {
        "difference": float((values(plain) - values(ours)).abs().max()),
        "ops": ops,
        "counted": counted,
        "digests": [
            replica_digest(ours, optimizer.optimizer),
            replica_digest(loaded, optimizer_again.optimizer),
        ],
    }


def frozen() -> dict[str, Any]:
    watch = Watch(freeze=True)
    accelerator, model, optimizer, batches = prepared(150)
    attachment = tailcut.attach(model, deadline_s=DEADLINE_S, optimizer=optimizer)
    train(accelerator, model, optimizer, attachment.batches(batches), watch)
    attachment.before_checkpoint()
    skipped = attachment.stats().skipped_steps
    attachment.close()
    return {**watch.result(), "skipped": skipped, "digest": digest(*model.parameters())}


def single() -> dict[str, Any]:
    _, model, optimizer, _ = prepared(1)
    return {"refused": refusal(lambda: tailcut.attach(model, PATIENT, optimizer))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    ways = {"equal": equal, "frozen": frozen, "single": single}
    report({way: ways[way]() for way in sys.argv[1:]})
