"""Two consecutive quantized linear layers with 8-bit values between them."""

from __future__ import annotations

import onnx

from .int8_layers import Int8Layer, sparse_integers


def chain_of_qlinear(second: str = "qlinear") -> tuple[Int8Layer, onnx.ModelProto]:
    """Return two layers; the input of the second exists only as 8-bit integers."""
    layer = Int8Layer(second, q=sparse_integers(24, 24))
    quantize, linear, dequantize = layer.nodes()
    again = onnx.NodeProto.FromString(linear.SerializeToString())
    again.name, again.input[0], again.output[0] = "second", "yq", "zq"
    again.input[1:3] = ["y_scale", "y_zero"]
    dequantize.input[0] = "zq"
    model = layer.model()
    del model.graph.node[:]
    model.graph.node.extend([quantize, linear, again, dequantize])
    return layer, model
