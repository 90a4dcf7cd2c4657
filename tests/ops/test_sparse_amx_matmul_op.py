"""Test SparseAMXMatMul in ORT with each feature set: against NumPy and its ONNX function, and on invalid input."""

from __future__ import annotations

import os
import platform
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortolan import _native
from ortolan.graph_passes.operators.sparse_amx_matmul_function import Uses, sparse_amx_matmul_function

from ..formats.bitmaps import malformed_bf16, mutate
from .isa_process import check_with_isa, each_isa, run_with_isa
from .linear_sizes import DIMENSIONS, SPARSITIES, M
from .single_node import assert_matmul_close, session, sparse_amx_matmul_model, sparse_weight


def function(opset: int = 17) -> onnx.FunctionProto:
    proto: onnx.FunctionProto = ir.to_proto(sparse_amx_matmul_function(opset, Uses()))
    return proto


@pytest.mark.parametrize("n", DIMENSIONS)
def test_kernel_and_function_body_agree(n: int) -> None:
    """ORT runs the kernel with the library, and the function without it; both must agree with NumPy."""
    rng = np.random.default_rng(n)
    body = function()
    for k in DIMENSIONS:
        for sparsity in SPARSITIES:
            w = sparse_weight(rng, k, n, sparsity)
            bias = rng.standard_normal(n, dtype=np.float32) if k % 2 else None
            model = sparse_amx_matmul_model(_native.pack_bitmap(w), k, n, bias, functions=(body,))
            kernel, inlined = session(model), session(model, library=False)
            for m in M:
                x = rng.standard_normal((m, k), dtype=np.float32)
                for run in (kernel, inlined):
                    assert_matmul_close(run.run(None, {"x": x})[0], x, w, bias)


def test_the_library_is_what_runs() -> None:
    """The model's ONNX function is wrong on purpose, so that the result tells whether ORT ran it or the kernel."""
    wrong = function()
    y_producer = next(node for node in wrong.node if "Y" in node.output)
    y_producer.op_type = "Sub"
    rng = np.random.default_rng(0)
    w, bias = sparse_weight(rng, 40, 20, 0.5), np.ones(20, np.float32)
    model = sparse_amx_matmul_model(_native.pack_bitmap(w), 40, 20, bias, functions=(wrong,))
    x = rng.standard_normal((3, 40), dtype=np.float32)
    assert_matmul_close(session(model).run(None, {"x": x})[0], x, w, bias)
    without = session(model, library=False).run(None, {"x": x})[0]
    assert_matmul_close(without, x, w, -bias)


@pytest.mark.parametrize("opset", range(13, 24))
def test_function_body_serves_every_opset(opset: int) -> None:
    rng = np.random.default_rng(opset)
    w = sparse_weight(rng, 50, 30, 0.5)
    model = sparse_amx_matmul_model(_native.pack_bitmap(w), 50, 30, functions=(function(opset),), opset=opset)
    onnx.checker.check_model(model)
    x = rng.standard_normal((4, 50), dtype=np.float32)
    for library in (True, False):
        assert_matmul_close(session(model, library=library).run(None, {"x": x})[0], x, w)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 3), (1, 2, 2, 2), (0,), (2, 0), (300,), (3, 257)])
def test_batched_inputs_of_any_rank(leading: tuple[int, ...], library: bool) -> None:
    k, n = 70, 40
    rng = np.random.default_rng(len(leading))
    w, bias = sparse_weight(rng, k, n, 0.5), rng.standard_normal(n, dtype=np.float32)
    model = sparse_amx_matmul_model(_native.pack_bitmap(w), k, n, bias, rank=len(leading) + 1, functions=(function(),))
    x = rng.standard_normal((*leading, k), dtype=np.float32)
    y = session(model, library=library).run(None, {"x": x})[0]
    assert y.shape == (*leading, n)
    assert_matmul_close(y.reshape(-1, n), x.reshape(-1, k), w, bias)


def test_output_shape_is_inferred_and_symbols_are_kept() -> None:
    model = sparse_amx_matmul_model(_native.pack_bitmap(np.ones((8, 6), np.float32)), 8, 6, rank=3)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert session(model).get_outputs()[0].shape == ["d0", "d1", 6]


def test_a_dimension_without_name_is_no_literal() -> None:
    """Exported models may have dimensions without a name, which shape inference must not read as size -1."""
    model = sparse_amx_matmul_model(_native.pack_bitmap(np.ones((8, 6), np.float32)), 8, 6, rank=3)
    for value in (model.graph.input[0], model.graph.output[0]):
        for dimension in list(value.type.tensor_type.shape.dim)[:2]:
            dimension.Clear()
    assert session(model).run(None, {"x": np.ones((2, 5, 8), np.float32)})[0].shape == (2, 5, 6)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    k, n = 520, 1000
    rng = np.random.default_rng(7)
    model = sparse_amx_matmul_model(_native.pack_bitmap(sparse_weight(rng, k, n, 0.5)), k, n)
    for m in (1, 5, 17, 600):
        x = rng.standard_normal((m, k), dtype=np.float32)
        one, two, three = (session(model, threads=threads).run(None, {"x": x})[0] for threads in (1, 2, 3))
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)


SCRIPT = """
import numpy as np
from ortolan import _native
from tests.ops.single_node import assert_matmul_close, session, sparse_amx_matmul_model, sparse_weight
rng = np.random.default_rng(1)
for k, n in ((33, 17), (100, 64), (288, 100)):
    w, bias = sparse_weight(rng, k, n, 0.5), rng.standard_normal(n, dtype=np.float32)
    s = session(sparse_amx_matmul_model(_native.pack_bitmap(w), k, n, bias))
    for m in (1, 3, 16, 40):
        x = rng.standard_normal((m, k), dtype=np.float32)
        assert_matmul_close(s.run(None, {"x": x})[0], x, w, bias)
"""


@each_isa
def test_with_each_isa_in_ort(isa: str) -> None:
    check_with_isa(isa, SCRIPT)


@pytest.mark.parametrize("isa", ["avx1024", "neon" if platform.machine() == "x86_64" else "avx2"])
def test_features_that_the_cpu_lacks_are_refused_when_the_library_is_registered(isa: str) -> None:
    script = """
import numpy as np
from ortolan import _native
from tests.ops.single_node import session, sparse_amx_matmul_model
info = _native.cpu_info()
has = f"ORTOLAN_ISA is '{sys.argv[1]}', expected one that this CPU has: {', '.join(info['detected_features'])}"
assert info["isa_problem"] == has, info
try:
    session(sparse_amx_matmul_model(_native.pack_bitmap(np.ones((2, 2), np.float32)), 2, 2))
except Exception as error:
    assert has in str(error), error
else:
    raise AssertionError("not refused")
"""
    done = run_with_isa(isa, script, isa)
    assert done.returncode == 0, done.stderr


def creation_error(model: onnx.ModelProto) -> str:
    with pytest.raises(Exception) as caught:
        session(model)
    return str(caught.value)


@pytest.mark.parametrize("case", malformed_bf16())
def test_malformed_weights_are_refused_when_the_session_is_made(case: str) -> None:
    tensors, k, n, _ = malformed_bf16()[case]
    text = creation_error(sparse_amx_matmul_model(tensors, k, n))
    assert "'linear'" in text and ("w.masks" in text or "k and n" in text), text


def test_weights_that_are_no_initializers_are_refused() -> None:
    model = sparse_amx_matmul_model(_native.pack_bitmap(np.ones((8, 6), np.float32)), 8, 6)
    masks = model.graph.initializer[0]
    model.graph.input.append(onnx.helper.make_tensor_value_info(masks.name, onnx.TensorProto.UINT8, masks.dims))
    model.graph.initializer.remove(masks)
    text = creation_error(model)
    assert "'linear'" in text and "w.masks" in text and "expected an initializer" in text


@pytest.mark.parametrize("attribute", ["k", "n", "format_version"])
def test_missing_attributes_are_refused(attribute: str) -> None:
    model = sparse_amx_matmul_model(_native.pack_bitmap(np.ones((8, 6), np.float32)), 8, 6)
    node = model.graph.node[0]
    kept = [a for a in node.attribute if a.name != attribute]
    del node.attribute[:]
    node.attribute.extend(kept)
    text = creation_error(model)
    assert attribute in text


def test_wrong_shapes_at_run_time_are_refused() -> None:
    model = sparse_amx_matmul_model(_native.pack_bitmap(np.ones((8, 6), np.float32)), 8, 6, np.zeros(6, np.float32))
    model.graph.input[0].type.tensor_type.shape.dim[1].Clear()
    with pytest.raises(Exception, match=r"'linear': X 'x' has shape \[2, 9\], expected \[..., 8\]"):
        session(model).run(None, {"x": np.zeros((2, 9), np.float32)})


def test_a_bias_of_wrong_length_is_refused() -> None:
    model = sparse_amx_matmul_model(_native.pack_bitmap(np.ones((8, 6), np.float32)), 8, 6, np.zeros(5, np.float32))
    assert "'linear': bias 'bias' has shape [5], expected [6]" in creation_error(model)
    # If the constant is computed at run time, the call rejects it.
    del model.graph.initializer[3]
    model.graph.input.append(onnx.helper.make_tensor_value_info("bias", onnx.TensorProto.FLOAT, [None]))
    feeds = {"x": np.ones((2, 8), np.float32), "bias": np.ones(6, np.float32)}
    np.testing.assert_array_equal(session(model).run(None, feeds)[0], np.full((2, 6), 9, np.float32))
    with pytest.raises(Exception, match=r"'linear': bias has shape \[5\], expected \[6\]"):
        session(model).run(None, feeds | {"bias": np.zeros(5, np.float32)})


def test_a_later_format_is_refused() -> None:
    model = sparse_amx_matmul_model(_native.pack_bitmap(np.ones((8, 6), np.float32)), 8, 6)
    next(a for a in model.graph.node[0].attribute if a.name == "format_version").i = 2
    assert "'linear': format_version is 2, this library reads 1. Upgrade ortolan" in creation_error(model)


RUNS_SCRIPT = """
import resource
import numpy as np
from ortolan import _native
from tests.ops.single_node import session, sparse_amx_matmul_model
model = sparse_amx_matmul_model(_native.pack_bitmap(np.ones((64, 32), np.float32)), 64, 32)
x = np.ones((1, 64), np.float32)
wide = np.ones((4096, 64), np.float32)
def work(runs):
    s = session(model)
    for _ in range(runs):
        s.run(None, {"x": x})
def sessions(count):
    for _ in range(count):
        session(model).run(None, {"x": wide})
def kib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() // 1024
work(2000), sessions(5)
before = kib()
work(50_000)
after_runs = kib()
sessions(30)
print(after_runs - before, kib() - after_runs)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="freed memory stays in quarantine")
def test_neither_runs_nor_sessions_leak() -> None:
    """A leaked allocator would cost 96 bytes per run, and a leaked arena at least 1 MB per session."""
    done = run_with_isa("", RUNS_SCRIPT)
    assert done.returncode == 0, done.stderr
    of_runs, of_sessions = map(int, done.stdout.split())
    assert of_runs < 1500, f"50,000 runs left {of_runs} KiB"
    assert of_sessions < 15_000, f"30 sessions left {of_sessions} KiB"


def test_mutated_models_neither_crash_nor_slip_through_ort() -> None:
    rng = np.random.default_rng(11)
    refused = 0
    for _ in range(300):
        k, n = int(rng.integers(1, 100)), int(rng.integers(1, 50))
        tensors, k, n = mutate(rng, _native.pack_bitmap(sparse_weight(rng, k, n, 0.5)), k, n)
        try:
            running = session(sparse_amx_matmul_model(tensors, k, n))
        except Exception as error:
            assert "'linear'" in str(error)
            refused += 1
        else:
            assert running.run(None, {"x": np.ones((2, k), np.float32)})[0].shape == (2, n)
    assert refused > 150
