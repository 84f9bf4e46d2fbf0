"""When a rank says that it is away: while it evaluates, and while its program asks for it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tailcut.pytorch.absence import Absence
from tailcut.pytorch.passes import Passes


class Words:
    """In place of the ops: what the others would be told."""

    def __init__(self) -> None:
        self.said: list[bool] = []

    def set_away(self, away: bool) -> None:
        self.said.append(away)


class Rank:
    def __init__(self) -> None:
        self.words, self.passes = Words(), Passes()
        self.absence = Absence(self.words, self.passes)
        self.model = nn.Linear(2, 2)
        self.model.register_forward_pre_hook(self.absence)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(1, 2))
        self.model.train()


def test_an_evaluation_is_told_once_and_so_is_its_end() -> None:
    rank = Rank()
    for _ in range(3):
        rank.evaluate()
    assert rank.words.said == [True]
    rank.absence.end()
    rank.absence.end()
    assert rank.words.said == [True, False]


def train_in_eval_mode(rank: Rank) -> None:
    rank.model.eval()
    rank.model(torch.ones(1, 2))


def predict_in_training_mode(rank: Rank) -> None:
    with torch.inference_mode():
        rank.model(torch.ones(1, 2))


def evaluate_within_a_step(rank: Rank) -> None:
    rank.passes.forwards = 1
    rank.evaluate()


@pytest.mark.parametrize("deed", [train_in_eval_mode, predict_in_training_mode, evaluate_within_a_step])
def test_nothing_else_is_an_evaluation(deed: Callable[[Rank], None]) -> None:
    rank = Rank()
    deed(rank)
    assert rank.words.said == []


def test_a_program_may_say_so_itself() -> None:
    rank = Rank()
    with rank.absence.lasting():
        assert rank.words.said == [True]
    assert rank.words.said == [True, False]


def test_a_copy_of_the_model_tells_nobody_and_a_saved_one_needs_no_tailcut() -> None:
    rank = Rank()
    saved = pickle.dumps(rank.model)
    assert b"tailcut" not in saved
    for twin in (copy.deepcopy(rank.model), pickle.loads(saved)):
        with torch.no_grad():
            assert torch.equal(twin.eval()(torch.ones(1, 2)), rank.model(torch.ones(1, 2)))
    assert rank.words.said == []


def test_a_compiled_model_is_one_graph_in_training_and_tells_of_an_evaluation() -> None:
    rank = Rank()
    torch.compile(rank.model, backend="eager", fullgraph=True)(torch.ones(1, 2)).sum().backward()
    assert rank.words.said == []
    rank.model.eval()
    with torch.no_grad():
        torch.compile(rank.model, backend="eager")(torch.ones(1, 2))
    assert rank.words.said == [True]
