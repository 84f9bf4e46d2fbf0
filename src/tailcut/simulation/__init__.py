"""Simulated groups and networks in virtual time: tailcut's own core, and other collectives beside it."""

from tailcut.simulation.baseline import Baseline, simulate_baseline
from tailcut.simulation.network import Partition
from tailcut.simulation.run import Policy, Simulation, simulate
from tailcut.simulation.scenario import Freeze, Hang, Scenario

__all__ = [
    "Baseline",
    "Freeze",
    "Hang",
    "Partition",
    "Policy",
    "Scenario",
    "Simulation",
    "simulate",
    "simulate_baseline",
]
