"""How far a decoded vector is from the one that was sent."""

from __future__ import annotations

import numpy as np


def nmse(got: np.ndarray, x: np.ndarray) -> float:
    error = got.astype(np.float64) - x
    return float(error @ error / (x.astype(np.float64) @ x))


def gain(got: np.ndarray, x: np.ndarray) -> float:
    return float(np.vdot(got, x) / np.vdot(x, x))
