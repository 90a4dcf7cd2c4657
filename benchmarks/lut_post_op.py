"""LutPostOp compared with ONNX Runtime's quantized operators and the chains that pass fuse_lut replaces.

A measurement times one chain as ONNX Runtime's own operators and as one LutPostOp, in the same rounds, on existing
tensors. The table is computed from the chain (graph_passes/find/lut.py), so both return the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ortolan.graph_passes.find.lut import find_cone, graph_order, make_table
from ortolan.graph_passes.measure.timing import interleave, pinned
from ortolan.graph_passes.passes.fuse_lut import OP_TYPE, lut_post_op_function

from ..errors import OrtolanError
from ..progress import Progress, no_progress
from ..session import register
from .result import BenchOptions, BenchResult, BenchRow

ELEMENTS = (1 << 20, 128 * 3072, 16 * 3072)
QUICK_ELEMENTS = ELEMENTS[:1]
SECONDS, QUICK_SECONDS = 2.0, 0.3
ROUNDS = 5

_OPSET = 21
_QUANTIZATION = {"s": np.float32(0.05), "t": np.float32(0.03)}


@dataclass(frozen=True)
class Peer:
    """A chain of ONNX Runtime operators from x to y."""

    name: str
    nodes: tuple[NodeProto, ...]
    x_type: type
    y_type: type


def peers() -> list[Peer]:
    """Return the chains that LutPostOp is compared with."""
    erf_gelu = [
        helper.make_node("Mul", ["x1", "root"], ["u"]),
        helper.make_node("Erf", ["u"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["p"]),
        helper.make_node("Mul", ["x1", "p"], ["m"]),
        helper.make_node("Mul", ["m", "half"], ["y1"]),
    ]
    return [
        Peer("ort_qlinear_sigmoid", (_qlinear("QLinearSigmoid"),), np.uint8, np.uint8),
        Peer("ort_qlinear_leaky_relu", (_qlinear("QLinearLeakyRelu", alpha=0.1),), np.uint8, np.uint8),
        Peer("ort_qdq_gelu_by_erf", _between(erf_gelu), np.uint8, np.uint8),
        Peer("ort_qdq_tanh", _between([helper.make_node("Tanh", ["x1"], ["y1"])]), np.uint8, np.uint8),
        Peer("ort_dq_gelu", _between([helper.make_node("Gelu", ["x1"], ["y"])], end=False), np.uint8, np.float32),
        Peer("ort_qdq_tanh_16", _between([helper.make_node("Tanh", ["x1"], ["y1"])]), np.uint16, np.uint16),
    ]


def run(options: BenchOptions, progress: Progress = no_progress) -> BenchResult:
    """Measure every chain, number of elements and threads. An interrupt returns the results so far."""
    for name in ("cases", "sparsity", "layers", "batch", "kinds", "group_size"):
        if getattr(options, name) is not None:
            raise OrtolanError(
                f"{OP_TYPE} has no weights: options about layers and weights do not apply; leave them out"
            )
    result = BenchResult(notes=["Both sides return the same answer. Elements: size of x, which is random."])
    sizes = QUICK_ELEMENTS if options.quick else ELEMENTS
    total = len(peers()) * len(sizes) * len(options.threads)
    try:
        for peer in peers():
            for threads in options.threads:
                for elements in sizes:
                    progress(f"{peer.name}, {elements} elements, threads {threads}", len(result.rows), total)
                    with pinned(threads):
                        result.rows.append(_measure(peer, elements, threads, options.quick))
    except KeyboardInterrupt:
        if not result.rows:
            raise
        result.interrupted = True
        result.notes.append(f"Interrupted: {len(result.rows)} of {total} measurements.")
    progress("done", total, total)
    return result


def _measure(peer: Peer, elements: int, threads: int, quick: bool) -> BenchRow:
    limits = np.iinfo(peer.x_type)
    x = np.random.default_rng(elements).integers(limits.min, limits.max, elements, peer.x_type, endpoint=True)
    model = peer_model(peer)
    calls = {"peer": _call(model, x, peer.y_type, threads), "ours": _call(our_model(model), x, peer.y_type, threads)}
    timings = interleave(calls, seconds=QUICK_SECONDS if quick else SECONDS, min_rounds=ROUNDS)
    case = {"elements": elements, "x": np.dtype(peer.x_type).name, "y": np.dtype(peer.y_type).name}
    return BenchRow(OP_TYPE, case, threads, timings["ours"], peer.name, timings["peer"])


def peer_model(peer: Peer) -> onnx.ModelProto:
    """Return the model of a peer."""
    constants = {
        **_QUANTIZATION,
        "zx": np.array(np.iinfo(peer.x_type).max // 2 + 1, peer.x_type),
        "zy": np.array(10, peer.x_type),
        "root": np.float32(0.5**0.5),
        "one": np.float32(1),
        "half": np.float32(0.5),
    }
    used = {name for node in peer.nodes for name in node.input}
    return _model(
        list(peer.nodes),
        peer.x_type,
        peer.y_type,
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items() if name in used],
    )


def our_model(peer: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that computes the peer's answer by one lookup."""
    graph = ir.from_proto(peer).graph
    x = graph.inputs[0]
    chain = find_cone(x, graph, graph_order(graph)).chain_to(graph.outputs[0])
    assert x.dtype is not None
    table = make_table(chain, x.dtype, graph.opset_imports)
    node = helper.make_node(OP_TYPE, ["x", "table"], ["y"], domain="ai.ortolan", format_version=1)
    model = _model([node], x.dtype.numpy().type, table.dtype.type, [numpy_helper.from_array(table, "table")])
    model.functions.append(ir.to_proto(lut_post_op_function(_OPSET)))
    return model


def _model(
    nodes: Sequence[NodeProto], x_type: type, y_type: type, initializers: Sequence[TensorProto]
) -> onnx.ModelProto:
    x, y = (
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["n"])
        for name, dtype in (("x", x_type), ("y", y_type))
    )
    graph = helper.make_graph(list(nodes), "chain", [x], [y], list(initializers))
    versions = {"": _OPSET, "com.microsoft": 1, "ai.ortolan": 1}
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(*one) for one in versions.items()], ir_version=10
    )


def _call(model: onnx.ModelProto, x: np.ndarray, y_type: type, threads: int) -> Callable[[], object]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # The threads of one candidate must not spin while another is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    given, answer = (ort.OrtValue.ortvalue_from_numpy(array) for array in (x, np.ones(len(x), y_type)))
    binding.bind_ortvalue_input("x", given)
    binding.bind_ortvalue_output("y", answer)

    def call(_keep: object = (given, answer)) -> None:
        session.run_with_iobinding(binding)

    return call


def _qlinear(op_type: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op_type, ["x", "s", "zx", "t", "zy"], ["y"], domain="com.microsoft", **attributes)


def _between(nodes: list[NodeProto], end: bool = True) -> tuple[NodeProto, ...]:
    """Return the nodes from x1 to y1, between DequantizeLinear and QuantizeLinear."""
    first = helper.make_node("DequantizeLinear", ["x", "s", "zx"], ["x1"])
    last = [helper.make_node("QuantizeLinear", ["y1", "t", "zy"], ["y"])] if end else []
    return (first, *nodes, *last)
