"""One-node models of ai.ortolan operators, and their expected outputs in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import _testing

Packed = tuple[np.ndarray, np.ndarray, np.ndarray]

# Unit roundoff of float32. A sum of k products, in any order, has an error of at most (k + c) * U * sum |x||w|, with a
# small constant c.
U = 2.0**-24


def to_bf16(a: np.ndarray) -> np.ndarray:
    """Return a rounded to bfloat16 (nearest even), as float32."""
    return a.astype(ml_dtypes.bfloat16).astype(np.float32)


def sparse_weight(rng: np.random.Generator, k: int, n: int, sparsity: float) -> np.ndarray:
    """Return float32 [k, n] with a fraction of about `sparsity` zeros; exactly none at 0 and all at 1."""
    w = rng.standard_normal((k, n), dtype=np.float32)
    w[rng.random((k, n)) < sparsity] = 0
    return w


def assert_matmul_close(y: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> None:
    """Check that y is bf16(x) @ bf16(w) + bias within the rounding of float32 sums in any order."""
    xr, wr = to_bf16(x).astype(np.float64), to_bf16(w).astype(np.float64)
    expected = xr @ wr + (0 if bias is None else bias.astype(np.float64))
    magnitude = np.abs(xr) @ np.abs(wr) + (0 if bias is None else np.abs(bias))
    # The last term is for avx512bf16, which flushes denormal sums to zero.
    bound = (w.shape[0] + 8) * U * magnitude + w.shape[0] * 1.2e-38
    error = np.abs(y - expected)
    assert y.shape == expected.shape
    assert np.all(error <= bound), f"largest error over bound: {np.max(error - bound)}"


def sparse_amx_matmul_model(
    packed: Packed,
    k: int,
    n: int,
    bias: np.ndarray | None = None,
    rank: int = 2,
    functions: tuple[onnx.FunctionProto, ...] = (),
    opset: int = 17,
    scales: np.ndarray | None = None,
    residual: np.ndarray | Sequence[int] | None = None,
    zero_points: np.ndarray | None = None,
    **attributes: float,
) -> onnx.ModelProto:
    """Return a model of one SparseAMXMatMul node "linear": input x [d0, …, k], output y [d0, …, n].

    The element type of the packed values selects the kind of weight; uint16 values and scales are bf16 bits. residual:
    a constant, or the shape of an input "residual".
    """
    masks, values, offsets = packed
    tensors = {"w.masks": masks, "w.values": _typed(values), "w.offsets": offsets}
    inputs = ["x", *tensors, "" if bias is None else "bias", "" if residual is None else "residual"]
    if bias is not None:
        tensors["bias"] = bias
    if scales is not None:
        inputs.append("w.scales")
        tensors["w.scales"] = _typed(scales)
    if zero_points is not None:
        inputs += [*[""] * (9 - len(inputs)), "w.zero_points"]  # zero points come after the norm's inputs
        tensors["w.zero_points"] = zero_points
    while not inputs[-1]:
        inputs.pop()
    leading = [f"d{i}" for i in range(rank - 1)]
    graph_inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*leading, k])]
    if isinstance(residual, np.ndarray):
        tensors["residual"] = residual
    elif residual is not None:
        graph_inputs.append(helper.make_tensor_value_info("residual", TensorProto.FLOAT, list(residual)))
    node = helper.make_node(
        "SparseAMXMatMul", inputs, ["y"], "linear", domain="ai.ortolan", k=k, n=n, format_version=1, **attributes
    )
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [*leading, n] if residual is None else None)
    initializers = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph([node], "single", graph_inputs, [output], initializers)
    return helper.make_model(
        graph,
        functions=list(functions),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )


def _typed(array: np.ndarray) -> np.ndarray:
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


def session(model: onnx.ModelProto | Path, *, library: bool = True, threads: int = 1) -> ort.InferenceSession:
    """Open an ORT session on a model or a model file.

    library: register Ortolan's kernels; otherwise ORT runs the operator's ONNX function.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if library:
        options.register_custom_ops_library(str(ortolan.get_library_path()))
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def assert_same_bits(y: np.ndarray, expected: np.ndarray) -> None:
    """Check that two float32 arrays have the same bits, including signs of zeros and payloads of NaNs."""
    np.testing.assert_array_equal(y.view(np.uint32), expected.view(np.uint32))


def at_odd_address(a: np.ndarray) -> np.ndarray:
    """Return a copy of the array that begins at an odd address and ends where its allocation ends."""
    memory = np.empty(a.nbytes + 1, np.uint8)
    copy = np.frombuffer(memory.data, a.dtype, offset=1).reshape(a.shape)
    copy[...] = a
    assert copy.ctypes.data % 2 == 1
    return copy


def with_constants(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Return the model with these feeds stored as constants instead of inputs."""
    changed = onnx.ModelProto.FromString(model.SerializeToString())
    graph = changed.graph
    inputs = [value for value in graph.input if value.name not in feeds]
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in feeds.items())
    del graph.input[:]
    graph.input.extend(inputs)
    return changed


def save_at_odd_places(model: onnx.ModelProto, folder: Path) -> None:
    """Save folder/model.onnx with its constants at unaligned offsets in folder/data."""
    content = b"!"
    for tensor in model.graph.initializer:
        if tensor.raw_data:
            place, size = len(content), len(tensor.raw_data)
            content += tensor.raw_data
            content += bytes(1 - len(content) % 2)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "data"), ("offset", place), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))
    (folder / "data").write_bytes(content)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def runnable_kernels() -> list[str]:
    """Return the names of the kernels that this CPU can run."""
    return [row["name"] for row in _testing.sparse_amx_matmul_kernels() if row["runs_here"]]
