"""Judges a change of kernels: the same models, timed with the libraries of two revisions in turns (__main__.py)."""
