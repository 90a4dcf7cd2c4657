"""How numbers are chosen: quantizers, pruners and packed caches, on numpy arrays; nothing here knows of graphs."""
