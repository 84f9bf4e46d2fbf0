"""Benchmarks that check their results. Uses only tailcut's public names."""
