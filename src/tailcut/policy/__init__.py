"""Decisions once per op: plain values from plain values. No clock, no I/O."""
