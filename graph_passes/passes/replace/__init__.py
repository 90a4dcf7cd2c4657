"""The pass replace: linear layers become Ortolan operators."""
