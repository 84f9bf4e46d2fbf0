"""Fixtures that several modules use."""

from tests.netns import loopback_names, two_hosts

__all__ = ["loopback_names", "two_hosts"]
