"""Makers of our operators' nodes and ONNX functions: one file per operator and one for its function."""
