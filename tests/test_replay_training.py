"""DDP training and its replay, in real processes: the same bits after every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.launch import LIMIT_S, ROOT, torchrun

STEPS = 12
SETTINGS = json.dumps({"drift_bound": 0, "deadline_s": 30.0, "codec": "planes"})


def replayed(ledger: Path, directory: Path, steps: int) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "-m", "tests.training.recorded", str(directory), str(steps), SETTINGS]
    env = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    tailcut = Path(sys.executable).with_name("tailcut")
    return subprocess.run(
        [str(tailcut), "replay", str(ledger), "--", *script],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_training_has_the_same_bits_again_at_every_step(tmp_path: Path) -> None:
    ledger, was, again = (tmp_path / name for name in ("ledger", "was", "again"))
    was.mkdir()
    again.mkdir()
    run = torchrun(2, "recorded", str(was), str(STEPS), SETTINGS, env={"TAILCUT_LEDGER": str(ledger)})
    assert run.code == 0, run.err
    replay = replayed(ledger, again, STEPS)
    assert replay.returncode == 0, replay.stderr
    for rank in range(2):
        digests = [json.loads((place / f"{rank}.json").read_text()) for place in (was, again)]
        assert len(digests[0]) == STEPS
        assert digests[0] == digests[1]
