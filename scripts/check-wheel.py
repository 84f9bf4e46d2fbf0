"""Checks an installed wheel where nothing else of the project is: two ranks average, the command answers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

import tailcut


def average(rank: int, store: tailcut.FileStore, array: np.ndarray) -> None:
    with tailcut.Group(rank, 2, store, deadline_s=30, codec="planes", planes=16) as group:
        group.allreduce(array).wait()


def main() -> None:
    arrays = [np.full(100_000, rank + 1, np.float32) for rank in range(2)]
    with tempfile.TemporaryDirectory() as directory:
        store = tailcut.FileStore(directory)
        threads = [threading.Thread(target=average, args=(rank, store, arrays[rank])) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(np.allclose(array, 1.5, rtol=1e-3) for array in arrays), arrays
    assert np.array_equal(*arrays)
    command = Path(sys.executable).with_name("tailcut")
    subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)
    print(f"tailcut {tailcut.__version__} from {Path(tailcut.__file__).parent}: two ranks agree")


if __name__ == "__main__":
    main()
