"""Decisions that are made once per op: plain values from plain values, without a clock and without I/O."""
