"""Time the same models with the libraries of two revisions, taking turns (see __main__.py)."""
