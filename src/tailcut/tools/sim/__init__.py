"""``tailcut sim`` runs the scenarios of the testbed in virtual time, for any number of ranks, with baselines.

for row in run(Options(scenario=load_scenario("tail-3"), ranks=(8, 64))):
    print(row.sides["tailcut"].percentile_s(99))
"""

from tailcut.tools.sim import plot
from tailcut.tools.sim.options import Options
from tailcut.tools.sim.run import Row, run

__all__ = ["Options", "Row", "plot", "run"]
