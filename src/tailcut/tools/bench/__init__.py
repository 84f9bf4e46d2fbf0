"""Benchmarks that check their results. They use only the public names of tailcut."""
