"""Texts as model inputs: tokenizers, in Python and as ONNX nodes."""
