"""Fixtures that several modules use, how the tests treat signals, which are fast, and which run alone."""

import fcntl
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.netns import loopback_names, two_hosts

__all__ = ["loopback_names", "two_hosts"]

SLOW_MODULES = {
    "test_attach",
    "test_attach_faults",
    "test_backend",
    "test_bench",
    "test_budget_rounds",
    "test_cli",
    "test_demo",
    "test_demo_freeze",
    "test_demo_report",
    "test_doctor",
    "test_epochs",
    "test_examples",
    "test_hybrid",
    "test_late_training",
    "test_multicast",
    "test_pacing",
    "test_policy_planes",
    "test_ports",
    "test_processes",
    "test_race",
    "test_replay_training",
    "test_sim_scenarios",
    "test_stalls",
    "test_testbed",
    "test_time_to_accuracy",
    "test_trimming",
    "test_workloads",
    "test_wrapped",
}
"""Modules that ``--fast`` leaves out. They start processes, build networks, train, or simulate for long."""

SLOW_TESTS = {
    "test_256_ranks_in_one_process",
    "test_decoding_is_unbiased_at_every_width_and_at_every_cut",
    "test_every_prefix_has_the_error_of_the_table",
    "test_in_a_grid_the_dead_place_weighs_nothing_in_every_row",
    "test_in_a_grid_two_may_die_and_one_may_come_back",
    "test_granules_with_few_contributions_are_not_clipped",
    "test_memory_is_bounded_and_does_not_grow_over_ten_thousand_ops",
    "test_more_than_256_members_are_served_too",
    "test_one_bit_is_drive_and_more_are_eden_within_four_percent",
    "test_planes_are_unbiased_whatever_is_cut_or_lost",
    "test_planes_err_by_at_most_a_tenth_more_than_in_a_flat_group",
    "test_planes_without_values_have_the_same_history",
    "test_what_is_reported_is_what_planes_cost",
}
"""Tests of other modules that it leaves out."""

FRAMEWORKS = Path(__file__).parent / "frameworks"
"""Tests of Lightning, Transformers, Accelerate, Ray and torchft. These take hundreds of megabytes, which only
``make test-frameworks`` installs."""

FAST_SEEDS = 25
"""``--fast`` takes this many seeds of a test that has more."""

IN_VIRTUAL_TIME = {
    "test_awaited",
    "test_baselines",
    "test_budget_rounds",
    "test_carry",
    "test_codec",
    "test_conservation",
    "test_elision",
    "test_epochs",
    "test_epsilon",
    "test_late_training",
    "test_pacing",
    "test_planes",
    "test_policy_deadline",
    "test_policy_early_exit",
    "test_policy_epochs",
    "test_policy_incast",
    "test_policy_planes",
    "test_ports",
    "test_replay",
    "test_report",
    "test_rules",
    "test_scenarios",
    "test_schedules",
    "test_sim_cli",
    "test_sim_hooks",
    "test_sim_network",
    "test_sim_scenarios",
    "test_standing",
    "test_steering",
    "test_straggler",
    "test_testbed_scenarios",
    "test_wire",
}
"""Modules that compute and simulate."""

PATIENT = {
    "test_absence",
    "test_attach",
    "test_attach_faults",
    "test_backend",
    "test_catch_up",
    "test_donor",
    "test_examples",
    "test_hybrid",
    "test_rejoin",
    "test_reliable",
    "test_replay_training",
    "test_resync",
    "test_scaling",
    "test_stalls",
    "test_wrapped",
}
"""Modules that wait for their processes as long as these take. Together with those above they run beside each
other with ``-n``; all other modules have the machine for themselves."""


def pytest_configure() -> None:
    """Let Ctrl-C end children also when a shell started the tests in the background, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out the tests that take long")
    parser.addoption("--frameworks", action="store_true", help="also collect tests/frameworks")


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is left out: a test that is not collected does not even count as skipped."""
    return (
        ""
        if config.getoption("--frameworks")
        else "tests/frameworks: NOT collected, see make test-frameworks"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path == FRAMEWORKS and not config.getoption("--frameworks"):
        return True
    return True if config.getoption("--fast") and collection_path.stem in SLOW_MODULES else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        left_out = [item for item in items if not _is_fast(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_fast(item)]
    items.sort(key=_needs_the_machine)  # at the end, so that nobody waits for them


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keep a test that needs the machine alone. The lock is on this file, which all workers have open."""
    with open(__file__) as file:
        if "PYTEST_XDIST_WORKER" in os.environ:
            fcntl.flock(file, fcntl.LOCK_EX if _needs_the_machine(item) else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a forked process has it too


def _needs_the_machine(item: pytest.Item) -> bool:
    return item.path.stem not in IN_VIRTUAL_TIME | PATIENT


def _is_fast(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    seed = callspec.params.get("seed", 0) if callspec else 0
    slow = item.get_closest_marker("long") or getattr(item, "originalname", item.name) in SLOW_TESTS
    return seed < FAST_SEEDS and not slow
