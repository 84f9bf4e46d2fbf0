"""Adapters to PyTorch: the only part of tailcut that imports torch."""
