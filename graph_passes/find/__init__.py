"""Finds parts of a model: linear layers, attention, KV caches, quantized weights, embeddings, dimensions."""
