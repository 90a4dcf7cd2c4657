"""Nodes and ONNX functions of Ortolan's operators: one file per operator, and one file for its function."""
