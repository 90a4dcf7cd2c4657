"""Finders for the parts of a model: layers, attention, caches, quantized forms, dimensions. They change nothing."""
