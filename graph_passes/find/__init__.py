"""Finders for the parts of a model: layers, attention, caches, quantized forms, dimensions. They do not change the graph."""
