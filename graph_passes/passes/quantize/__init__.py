"""Pass quantize: quantize weights of linear layers to 8-bit or 4-bit integers."""
