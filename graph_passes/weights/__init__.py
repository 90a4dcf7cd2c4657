"""Quantizers, pruners and cache formats: algorithms on numpy arrays, independent of graphs."""
