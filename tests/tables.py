"""Tables of the simulation, row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt


def rows(table: npt.NDArray[np.void]) -> list[Any]:
    """Each with the table's columns as attributes."""
    names = table.dtype.names or ()
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in table.tolist()]
