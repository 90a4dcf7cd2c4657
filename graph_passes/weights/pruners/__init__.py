"""Pruning algorithms on arrays, for pass prune: choose the weights to prune, and adjust the rest."""
