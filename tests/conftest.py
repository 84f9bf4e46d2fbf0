"""Fixtures that several modules use."""

from tests.netns import two_hosts

__all__ = ["two_hosts"]
