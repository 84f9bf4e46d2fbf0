"""Fixtures that several modules use, and how the tests treat signals."""

import signal

from tests.netns import loopback_names, two_hosts

__all__ = ["loopback_names", "two_hosts"]


def pytest_configure() -> None:
    """A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
