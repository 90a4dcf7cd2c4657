"""Pass replace: replace linear layers with Ortolan operators."""
