"""Quantization methods on numpy arrays, independent of graphs. One method per module."""
