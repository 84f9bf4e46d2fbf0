"""The Trainer of Transformers under torchrun: through tailcut and without, or with a rank that freezes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import tailcut.transformers
from tests.frameworks.checks import DEADLINE_S
from tests.frameworks.common import BATCH, Watch
from tests.training.common import RANKS, digest, heard_warnings, report, values

STEPS = 6
WORDS, LENGTH = 64, 12


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **no_dropout, bos_token_id=0, eos_token_id=0))


def texts(steps: int) -> list[dict[str, torch.Tensor]]:
    """Of differing lengths, so that ranks have differing numbers of tokens in a step."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps * BATCH * RANKS):
        words = torch.randint(WORDS, (LENGTH,), generator=generator)
        labels = words.clone()
        labels[int(torch.randint(3, LENGTH, (1,), generator=generator)) :] = -100
        found.append({"input_ids": words, "labels": labels})
    return found


class Timing(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.watch.step()


def trainer_of(steps: int, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=1e-2,
        logging_steps=2,
        dataloader_pin_memory=False,
        **{**quiet, **options},
    )
    return Trainer(model(), arguments, train_dataset=texts(steps), callbacks=list(callbacks))


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compared(**options: Any) -> dict[str, Any]:
    plain = trainer_of(STEPS, **options)
    plain.train()
    ours = trainer_of(STEPS, **options)
    with heard_warnings() as heard:
        training = tailcut.transformers.attach(ours, deadline_s=60)
        ours.train()
    assert training.attachment is not None
    return {
        "difference": float((values(plain.model) - values(ours.model)).abs().max()),
        "ops": training.attachment.stats().ops,
        "losses": [losses(plain), losses(ours)],
        "steps": [plain.state.global_step, ours.state.global_step],
        "flos": [plain.state.total_flos, ours.state.total_flos],
        "warnings": heard,
        "restored": "get_batch_samples" not in vars(ours),
    }


def equal() -> dict[str, Any]:
    saved = compared(save_strategy="steps", save_steps=3)
    return {
        "plain": compared(),
        "accumulation": compared(gradient_accumulation_steps=2),
        "unused": compared(ddp_find_unused_parameters=True, include_num_input_tokens_seen="all"),
        "saved": {**saved, "files": sorted(path.name for path in Path("out").glob("checkpoint-*"))},
    }


def frozen() -> dict[str, Any]:
    watch = Watch(freeze=True)
    trainer = trainer_of(150, Timing(watch))
    training = tailcut.transformers.attach(trainer, deadline_s=DEADLINE_S)
    trainer.train()
    assert training.attachment is not None
    return {
        **watch.result(),
        "skipped": training.attachment.stats().skipped_steps,
        "global_step": trainer.state.global_step,
        "digest": digest(*trainer.model.parameters()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    ways = {"equal": equal, "frozen": frozen}
    report({way: ways[way]() for way in sys.argv[1:]})
