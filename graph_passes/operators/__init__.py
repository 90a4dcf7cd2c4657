"""How the nodes of each operator, and its ONNX function, are made. One file an operator, and one for its function."""
