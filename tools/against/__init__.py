"""Time the same models with the libraries of two revisions in turns (see __main__.py)."""
