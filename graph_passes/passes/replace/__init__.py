"""Pass replace: linear layers become Ortolan operators."""
