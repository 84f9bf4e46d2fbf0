"""What the training scripts share: models, batches, a digest of a replica, what the process has open."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tailcut import Config

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
PATIENT = Config(deadline_s=60.0, adaptive=False)
"""On a busy machine a worker may stand still for seconds. Nothing may be lost by that here, so no bound is
learned."""

INPUTS, OUTPUTS = 128, 5


def join_group(init_method: str = "env://", backend: str = "gloo") -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=RANK,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )


def perceptron(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, OUTPUTS),
    )


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one on every rank and in every step: only an average makes replicas agree."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    inputs = torch.randn(8, INPUTS, generator=generator)
    targets = torch.randn(8, OUTPUTS, generator=generator)
    return inputs.to(dtype), targets.to(dtype)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype if isinstance(model, nn.Module) else torch.float32
    inputs, targets = batch(step, dtype)
    return nn.functional.mse_loss(model(inputs), targets)


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def digest(*tensors: torch.Tensor) -> str:
    together = hashlib.sha256()
    for tensor in tensors:
        together.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return together.hexdigest()


def replica_digest(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        for parameter in model.parameters():
            tensors += [v for v in optimizer.state[parameter].values() if torch.is_tensor(v)]
    return digest(*tensors)


def udp_sockets() -> int:
    """UDP sockets that this process holds."""
    inodes = {line.split()[9] for line in Path("/proc/self/net/udp").read_text().splitlines()[1:]}
    held = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            held += os.readlink(f"/proc/self/fd/{descriptor}").removeprefix("socket:[")[:-1] in inodes
    return held


def tailcut_threads() -> int:
    return sum(thread.name.startswith("tailcut") for thread in threading.enumerate())


def native_threads(expected: int | None = None) -> int:
    """The threads of this process. One that was joined may be listed a moment longer than it lives."""
    give_up = time.monotonic() + 10
    while (count := len(os.listdir("/proc/self/task"))) != expected and expected is not None:
        if time.monotonic() > give_up:
            break
    return count


@contextlib.contextmanager
def heard_warnings() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        ours = [w for w in caught if "tailcut" in str(w.message)]
        tests = Path(__file__).parent.parent
        assert all(tests in Path(w.filename).parents for w in ours)  # the user's code
        texts += [str(w.message) for w in ours]


def refusal(attempt: Callable[[], object]) -> str:
    """The error that an attempt ends with, as a user reads it."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "was not refused"


class Cases:
    """Functions that return what a test looks at. All are run in one process, for a launch is dear."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._functions: dict[str, Callable[[], dict[str, Any]]] = {}

    def __call__(self, function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        self._functions[function.__name__] = function
        return function

    def run(self, names: list[str]) -> None:
        join_group(backend=self._backend)
        results: dict[str, Any] = {}
        for name in names or list(self._functions):
            try:
                results[name] = self._functions[name]()
            except Exception:
                results[name] = {"error": traceback.format_exc()}
            report(results)
        dist.destroy_process_group()


def report(results: dict[str, Any]) -> None:
    Path(f"{RANK}.json").write_text(json.dumps(results))


def say(message: Any) -> None:
    print(json.dumps(message), flush=True)


def hear() -> str:
    return sys.stdin.readline().strip()
