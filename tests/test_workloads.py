"""tailcut.pytorch.workloads: what races train."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import torch

from tailcut import ConfigError
from tailcut.pytorch.workloads import NAMES, Workload, load, pretrain


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("checkpoint") / "gpt.pt"
    pretrain.main([str(file), "--steps", "4"])
    return file


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Several threads of torch wait for each other where tests run beside others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(workload: Workload, batch: int) -> Workload:
    workload.batch = batch
    return workload


def train(workload: Workload, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = workload.loss(model, workload.places(0, step, 0, 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet", "gpt"])
def test_every_workload_learns_from_what_is_always_there(name: str) -> None:
    workload = load(name)
    losses = train(small(workload, 2), 6) if name == "gpt" else train(small(workload, 32), 45)
    assert min(losses[-3:]) < 0.9 * losses[0]


def test_a_model_has_about_the_parameters_that_its_place_in_the_race_asks_for() -> None:
    parameters = {name: load(name).facts().parameters for name in ("cnn", "mlp", "gpt")}
    assert parameters == {"cnn": 1_592_326, "mlp": 1_033_910, "gpt": 1_095_520}


def test_ranks_share_one_batch_whatever_their_number() -> None:
    workload = load("mlp")
    whole = workload.places(3, 7, 0, 1)
    parts = [workload.places(3, 7, rank, 4) for rank in range(4)]
    assert torch.equal(torch.stack(parts, 1).flatten(), whole)
    assert not torch.equal(whole, workload.places(3, 8, 0, 1))
    assert not torch.equal(whole, workload.places(4, 7, 0, 1))


def test_evaluating_leaves_a_model_as_it_was() -> None:
    workload = load("resnet")
    model = workload.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert 0 <= workload.evaluate(model) <= 1
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("place", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_is_read_where_others_put_it(tmp_path: Path, place: str) -> None:
    directory = tmp_path / place
    directory.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 20), ("t10k", 10)):
        pixels = bytes(16) + bytes(range(100, 100 + count)) * (28 * 28)
        labels = bytes(8) + bytes(i % 10 for i in range(count))
        (directory / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(pixels))
        (directory / f"{part}-labels-idx1-ubyte").write_bytes(labels)  # torchvision unpacks them
    workload = load("cnn", tmp_path)
    assert workload.examples() == 20
    assert workload.source == "Fashion-MNIST"
    assert 0 <= workload.evaluate(workload.model(), whole=True) <= 1


def test_any_text_will_do(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("to be or not to be, " * 200)
    losses = train(small(load("gpt", file), 2), 4)
    assert losses[-1] < losses[0]


def test_finetuning_begins_where_the_checkpoint_ended(checkpoint: Path) -> None:
    fresh, tuned = load("gpt"), load("gpt-finetuned", None, checkpoint)
    assert tuned.evaluate(tuned.model()) < fresh.evaluate(fresh.model()) - 0.5


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("cnn", r"no train-images-idx3-ubyte.gz in .*FashionMNIST/raw"),
        ("gpt", "is no text file and has no input.txt"),
        ("gpt-finetuned", "none is given: python -m tailcut.pytorch.workloads.pretrain FILE.pt"),
        ("vgg", "there is no workload 'vgg'; there are cnn, mlp"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(name, tmp_path)


def test_the_list_of_names_is_complete(checkpoint: Path) -> None:
    assert [load(name, None, checkpoint).name for name in NAMES] == list(NAMES)
