"""Pass prune: set the least important weights of linear layers to zero."""
