"""ONNX Runtime sessions for comparing and timing models; they log nothing and do not disturb other sessions.

On x86 CPUs with AVX2 but without VNNI, ONNX Runtime multiplies uint8 by int8 with vpmaddubsw, which saturates at 16
bits: 2 * 255 * 127 becomes 32767. Full-range products lose up to 15 % of their norm in every int8 layer. Sessions for
comparison enable the exact sums that ONNX specifies (session.x64quantprecision). Timed sessions do not, because exact
sums are slower.
"""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.errors import one_line
from ortolan.session import open_session, register

from ..files.model_file import ModelFile, to_bytes
from .feeds import Feeds, Outputs
from .machine import default_threads

_THREADS: ContextVar[int | None] = ContextVar("threads", default=None)
_EXACT_SUMS = "session.x64quantprecision"
# With value 1, a MatMulNBits that ONNX Runtime fuses from DequantizeLinear computes in float32.
_BLOCKS_LEVEL = "session.qdq_matmulnbits_accuracy_level"
# Parts of the names of operators that multiply integers, or that ONNX Runtime may fuse into such operators.
_INTEGERS = re.compile("Integer|Linear|uantize|NBits|^Q[A-Z]")
_DISABLED = "optimization.disable_specified_optimizers"


@contextmanager
def threads_of_sessions(threads: int | None) -> Iterator[None]:
    """Set the number of intra-op threads of sessions opened in this context; None: default_threads()."""
    token = _THREADS.set(threads)
    try:
        yield
    finally:
        _THREADS.reset(token)


def session_threads() -> int:
    """Return the number of intra-op threads of sessions in this context."""
    return _THREADS.get() or default_threads()


def quiet_options(source: ModelFile | None = None) -> Any:
    """Return session options.

    Args:
        source: The given model, for a session that is not timed. If the model is large, packing is disabled, so that
            ONNX Runtime reads weights from the mapped file and keeps no packed copy.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # log only fatal errors; others are reported by Ortolan's exceptions
    options.intra_op_num_threads = session_threads()
    # Threads of one session must not spin while another is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if source is not None and source.is_large:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def open_quietly(
    model: Path | bytes,
    source: ModelFile | None = None,
    *,
    library: bool = False,
    data_folder: Path | None = None,
    in_float: bool = False,
    fold: bool = True,
) -> Any:
    """Open a session for comparison: its integer sums are exact if ONNX Runtime supports that (`sums_are_exact`).

    Args:
        model: A file, or the serialized model.
        source: See `quiet_options`.
        library: Register Ortolan's operators.
        data_folder: See `open_session`.
        in_float: Do not let ONNX Runtime round the inputs of a MatMul whose weight is a DequantizeLinear of int4
            blocks.
        fold: Let ONNX Runtime fold constants. It keeps the result of each step, so weights that ONNX functions unpack
            take many times the model's memory. On CPUs whose int8 products saturate, constants are always folded,
            because exact products need constant weights.
    """

    def opened(content: Path | bytes, exact: bool) -> Any:
        options = quiet_options(source)
        options.add_session_config_entry(_EXACT_SUMS, "1" if exact else "0")
        if in_float:
            options.add_session_config_entry(_BLOCKS_LEVEL, "1")
        if not fold and not int8_products_saturate():
            options.add_session_config_entry(_DISABLED, "ConstantFolding")
        if library:
            register(options)
        folder = data_folder if isinstance(model, bytes) else model.parent if isinstance(content, bytes) else None
        return open_session(content, options, data_folder=folder)

    if int8_products_saturate() and not _has_integers_in_branches(model):
        # With exact sums, ONNX Runtime fails on tensors that two layers share, on blocks without zero points, and on
        # int8 inputs. If the model itself is invalid, the normal session below reports the error.
        with suppress(Exception):
            exact = _with_zero_points_of_blocks(model)
            with suppress(Exception):
                return opened(exact, exact=True)
            return opened(_with_own_int8_tensors(exact), exact=True)
    return opened(model, exact=False)


def _read(model: Path | bytes) -> Any:
    import onnx

    return onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model, load_external_data=False)


def _mentions(model: Path | bytes, text: bytes) -> bool:
    """Return whether the model's bytes contain the text; faster than parsing the model."""
    if isinstance(model, bytes):
        return text in model
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def _has_integers_in_branches(model: Path | bytes) -> bool:
    """Return whether subgraphs may multiply integers; ONNX Runtime computes exact sums only in the main graph."""
    import onnx

    if not any(_mentions(model, name) for name in (b"then_branch", b"body")):
        return False
    graphs = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)

    def nodes_of_branches(holder: Any) -> Iterator[Any]:
        for attribute in (one for node in holder.node for one in node.attribute if one.type in graphs):
            for branch in (attribute.g, *attribute.graphs):
                yield from branch.node
                yield from nodes_of_branches(branch)

    proto = _read(model)
    in_branches = [node for holder in (proto.graph, *proto.functions) for node in nodes_of_branches(holder)]
    # Branches may call functions.
    in_functions = [node for function in proto.functions for node in function.node] if in_branches else []
    return any(_INTEGERS.search(node.op_type) for node in (*in_branches, *in_functions))


def _with_zero_points_of_blocks(model: Path | bytes) -> Path | bytes:
    """Add zero points of 0 to block-quantized int8 tensors without zero points.

    ONNX Runtime turns such tensors into uint8 with a single zero point, which it refuses at run time.
    """
    import onnx

    if not _mentions(model, b"block_size"):
        return model
    proto = _read(model)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    changed = False
    for node in proto.graph.node:
        has_blocks = any(one.name == "block_size" and one.i for one in node.attribute)
        if node.op_type != "DequantizeLinear" or not has_blocks or len(node.input) != 2:
            continue
        q, scales = (tensors.get(name) for name in node.input)
        if q is not None and scales is not None and q.data_type == onnx.TensorProto.INT8:
            zeros = np.zeros(scales.dims, np.int8)
            name = f"{node.input[0]}/{node.output[0]}/zero_points"
            proto.graph.initializer.append(onnx.numpy_helper.from_array(zeros, name))
            node.input.append(name)
            changed = True
    return to_bytes(proto) if changed else model


def _with_own_int8_tensors(model: Path | bytes) -> bytes:
    """Copy int8 tensors for each use, because ONNX Runtime adds a uint8 copy per use, all under the same name."""
    import onnx

    proto = _read(model)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.INT8}
    taken = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    used: set[str] = set()
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            if name in used:
                own = next(wanted for number in count(2) if (wanted := f"{name}_{number}") not in taken)
                taken.add(own)
                proto.graph.initializer.add().CopyFrom(tensors[name])
                proto.graph.initializer[-1].name = node.input[index] = own
            elif name in tensors:
                used.add(name)
    return to_bytes(proto)


def open_to_time(model: Path | bytes, *, library: bool = False) -> Any:
    """Open a session with a user's settings, regardless of the memory that it takes."""
    options = quiet_options()
    if library:
        register(options)
    return open_session(model, options)


def sums_are_exact(session: Any) -> bool:
    """Return whether this session, opened by `open_quietly`, computes exact uint8 x int8 products."""
    if not int8_products_saturate():
        return True
    asked: str = session.get_session_options().get_session_config_entry(_EXACT_SUMS)
    return asked == "1"


@functools.cache
def int8_products_saturate() -> bool:
    """Return whether uint8 x int8 products saturate in a default ONNX Runtime session on this CPU, by running one."""
    from onnx import TensorProto, helper, numpy_helper

    codes, weight = np.full((2, 64), 255, np.uint8), np.full((64, 16), 127, np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, codes.shape)],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [2, 16])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    (sums,) = open_to_time(to_bytes(model)).run(None, {"x": codes})
    return not np.array_equal(sums, codes.astype(np.int32) @ weight.astype(np.int32))


def run_session(session: Any, feeds: Feeds, who: str, error_type: type[Exception]) -> Outputs:
    """Run a session on feeds.

    Args:
        session: The session.
        feeds: Inputs.
        who: The subject of the error message, such as "the original model".
        error_type: The exception to raise.

    Raises:
        error_type: The session does not run.
    """
    try:
        answers = session.run(None, feeds)
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise error_type(f"{who} does not run on the feeds: {one_line(error)}; nothing was saved") from error
    return only_numbers(answers)


def only_numbers(answers: Sequence[Any]) -> Outputs:
    """Return the answers of a session, with None for strings, sequences and maps."""
    return [answer if isinstance(answer, np.ndarray) and answer.dtype.kind in "fiub" else None for answer in answers]
