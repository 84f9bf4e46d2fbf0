"""examples/: each as its reader starts it, with torchrun, on two workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

CALLS = [
    ("ddp_digits.py", ["--steps", "40", "--batch", "16"], r"test accuracy \d+\.\d\d%"),
    ("gpt_text.py", ["--steps", "20", "--batch", "2", "--context", "32"], r"validation loss \d\.\d{4}"),
]


@pytest.mark.parametrize(("name", "arguments", "verdict"), CALLS, ids=[name for name, _, _ in CALLS])
def test_loss_falls_and_nothing_is_lost(name, arguments, verdict):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"tailcut .*: gradients of .*\n", done.stderr)  # it prints stats() itself

    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)$", done.stdout, re.MULTILINE)]
    assert losses[-1] < 0.8 * losses[0]
    assert re.search(verdict, done.stdout)
    assert re.search(r"\d+ ops, 0 partial, 0\.00% of the results lost", done.stdout)


@pytest.mark.parametrize("name", [name for name, _, _ in CALLS])
def test_tailcut_is_three_lines(name):
    lines = (EXAMPLES / name).read_text().splitlines()
    assert [
        line.split()[-3:] for line in lines if re.search(r"tailcut\.|import tailcut|attachment", line)
    ] == [
        ["1", "of", "3"],
        ["2", "of", "3"],
        ["3", "of", "3"],
    ]
