"""What a model holds: linear layers, attentions, caches, quantized forms, dimensions. Nothing here changes a model."""
