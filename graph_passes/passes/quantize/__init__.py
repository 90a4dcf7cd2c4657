"""Pass quantize: weights of linear layers become 8-bit or 4-bit integers."""
