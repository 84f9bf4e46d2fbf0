"""A GPT of a million parameters that predicts the bytes of a text: from scratch, or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tailcut.errors import ConfigError
from tailcut.pytorch.workloads.sources import python_text, text
from tailcut.pytorch.workloads.workload import Workload

SYMBOLS = 256
"""Bytes, so that a checkpoint of one text fits every other."""
CONTEXT = 128
WIDTH, HEADS, DEPTH = 144, 4, 4
EVALUATED_PASSAGES = 16
WHOLE_PASSAGES = 128
LEARNING_RATE, FINETUNING_RATE = 1e-3, 3e-4


class Gpt(nn.Module):
    """1.1 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, DEPTH, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        known = self.symbol(codes) + self.place[: codes.shape[1]]
        predicted: torch.Tensor = self.head(self.blocks(known, mask=mask, is_causal=True))
        return predicted


class Language(Workload):
    """Learns nine tenths of a text by AdamW. The last tenth is for validation."""

    batch = 16
    figure = "validation loss"
    higher_is_better = False

    def __init__(
        self,
        name: str,
        codes: torch.Tensor,
        source: str,
        *,
        target: float,
        learning_rate: float,
        checkpoint: Path | None = None,
    ) -> None:
        self.name, self.source, self.target = name, source, target
        split = len(codes) * 9 // 10
        self._training, self._validation = codes[:split], codes[split:]
        if len(self._validation) <= CONTEXT:
            raise ConfigError(f"{source} is too short: it needs {10 * CONTEXT} bytes")
        self._learning_rate = learning_rate
        self._state = torch.load(checkpoint, weights_only=True) if checkpoint else None

    def model(self) -> nn.Module:
        model = Gpt()
        if self._state is not None:
            model.load_state_dict(self._state)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self._learning_rate)

    def examples(self) -> int:
        return len(self._training) - CONTEXT

    def loss(self, network: nn.Module, places: torch.Tensor) -> torch.Tensor:
        return _loss(network, self._training, places)

    def figure_of(self, model: nn.Module, whole: bool) -> float:
        passages = WHOLE_PASSAGES if whole else EVALUATED_PASSAGES
        places = torch.linspace(0, len(self._validation) - CONTEXT - 1, passages).long()
        parts = places.reshape(-1, EVALUATED_PASSAGES)
        return float(torch.stack([_loss(model, self._validation, part) for part in parts]).mean())


def gpt(data: Path | None) -> Workload:
    codes, source = _text(data)
    return Language("gpt", codes, source, target=2.4, learning_rate=LEARNING_RATE)


def gpt_finetuned(data: Path | None, checkpoint: Path | None) -> Workload:
    if checkpoint is None or not checkpoint.is_file():
        raise ConfigError(
            "gpt-finetuned begins with a checkpoint, and "
            + (f"{checkpoint} is no file" if checkpoint else "none is given")
            + ": python -m tailcut.pytorch.workloads.pretrain FILE.pt makes one"
        )
    codes, source = _text(data)
    return Language(
        *("gpt-finetuned", codes, source),
        target=2.2,
        learning_rate=FINETUNING_RATE,
        checkpoint=checkpoint,
    )


def _text(data: Path | None) -> tuple[torch.Tensor, str]:
    return (python_text(), "Python's help()") if data is None else (text(data), "text")


def _loss(network: nn.Module, codes: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    passages = codes[first[:, None] + torch.arange(CONTEXT + 1)]
    predicted = network(passages[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(predicted, passages[:, 1:].flatten())
