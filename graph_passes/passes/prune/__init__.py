"""The pass prune: the least important weights of linear layers become zero."""
