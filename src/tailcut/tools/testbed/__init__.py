"""``tailcut testbed``: hosts, a switch that trims, and trouble on purpose, inside one machine.

with Testbed.up(load_scenario("tail-3")) as testbed:
    processes = [testbed.spawn(host.rank, ["python", "train.py"]) for host in testbed.hosts]
"""

from tailcut.tools.testbed.counters import PortCounters
from tailcut.tools.testbed.scenario import HostScenario
from tailcut.tools.testbed.scenario_file import load_scenario, parse_scenario, scenario_text, shipped_names
from tailcut.tools.testbed.testbed import Host, Testbed

__all__ = [
    "Host",
    "HostScenario",
    "PortCounters",
    "Testbed",
    "load_scenario",
    "parse_scenario",
    "scenario_text",
    "shipped_names",
]
