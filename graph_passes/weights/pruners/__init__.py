"""Which weights go, and what becomes of the rest: arithmetic on arrays, for pass prune."""
