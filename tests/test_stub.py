"""The committed stub of the native module says what the module has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).parent.parent / "src" / "tailcut" / "_native.pyi"


def test_the_committed_stub_is_what_the_module_generates(tmp_path: Path) -> None:
    made = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "tailcut._native", "-o", str(made)]
    subprocess.run(command, check=True)
    assert made.read_text() == STUB.read_text(), "run `make stub` after changing native/bindings.cpp"
