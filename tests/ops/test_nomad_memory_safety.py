"""Test NoMADAttention with constants at odd addresses and sizes whose products overflow; test its plan without ORT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortolan import _testing

from .attention_node import node_model as attention_model
from .cached_attention import HIDDEN, Decoder, Setup, node_model
from .isa_process import check_with_isa
from .single_node import save_at_odd_places, session, with_constants

HUGE = 2**44


@pytest.mark.parametrize("kind", ["codes", "codes_float"])
@pytest.mark.parametrize("d_sub", [1, 4])
def test_codebooks_and_prompts_at_odd_addresses(kind: str, d_sub: int, tmp_path: Path) -> None:
    setup = Setup(kind=kind, d_sub=d_sub, rotary="half", window=5, sinks=2, prompt=40)
    model = node_model(setup)
    even = session(model)
    save_at_odd_places(model, tmp_path)
    odd, decoder = session(tmp_path / "model.onnx"), Decoder(setup)
    for queries in (40, 1, 7):
        call = decoder.call(queries)
        for found, expected in zip(odd.run(None, call.feeds), even.run(None, call.feeds), strict=True):
            np.testing.assert_array_equal(found, expected)


def check_constants(model: onnx.ModelProto, feeds: dict[str, np.ndarray], folder: Path) -> None:
    """Check that all inputs may be constants, at unaligned offsets of a file."""
    constant = with_constants(model, feeds)
    save_at_odd_places(constant, folder)
    odd, even = session(folder / "model.onnx").run(None, {}), session(model).run(None, feeds)
    for found, expected in zip(odd, even, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["float", "codes", "codes_float"])
def test_constant_inputs_of_a_cache_at_odd_addresses(kind: str, tmp_path: Path) -> None:
    setup = Setup(kind=kind, rotary="half", mask=True, window=5 if kind != "float" else 0)
    decoder = Decoder(setup)
    for queries, tokens in ((40, 40), (1, 41), (7, 48)):
        mask = np.zeros((2, 1, 1, tokens), np.float32)
        mask[1, ..., :3] = HIDDEN
        check_constants(node_model(setup), decoder.call(queries, mask=mask).feeds, tmp_path)


@pytest.mark.parametrize("mask", [(1,), (2, 1, 1, 70), (4, 70, 70), (2, 1, 70, 1)])
def test_constant_inputs_at_odd_addresses(mask: tuple[int, ...], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 70, 60), "mask": mask, "key": (2, 70, 30), "value": (2, 70, 30)}
    feeds = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    check_constants(attention_model(4, 2, mask_rank=len(mask)), feeds, tmp_path)


SCRIPT = """
import tempfile
from pathlib import Path
from tests.ops.test_nomad_memory_safety import (
    test_codebooks_and_prompts_at_odd_addresses as test_codebooks,
    test_constant_inputs_at_odd_addresses as test_inputs,
    test_constant_inputs_of_a_cache_at_odd_addresses as test_cache,
)
with tempfile.TemporaryDirectory() as folder:
    for kind in ("codes", "codes_float"):
        test_codebooks(kind, 1, Path(folder))
        test_cache(kind, Path(folder))
    test_cache("float", Path(folder))
    for mask in ((1,), (2, 1, 1, 70), (4, 70, 70), (2, 1, 70, 1)):
        test_inputs(mask, Path(folder))
"""


def test_odd_addresses_without_vectors() -> None:
    check_with_isa("scalar", SCRIPT)


def test_a_huge_mask_of_no_sequences() -> None:
    """The mask has no elements, but the product of its other dimensions does not fit 64 bits.

    NumPy cannot hold such arrays.
    """
    model = attention_model(1, mask_rank=4)
    graph, shapes = model.graph, {"query": [0, 2**62, 1], "mask": [0, 1, 2**62, 2**24], "key": [0, 2**24, 1]}
    shapes["value"] = shapes["key"]
    del graph.input[:]
    for name, shape in shapes.items():
        graph.node.insert(0, helper.make_node("ConstantOfShape", [f"{name}_shape"], [name]))
        graph.input.append(helper.make_tensor_value_info(f"{name}_shape", TensorProto.INT64, [len(shape)]))
    graph.node.append(helper.make_node("Shape", ["y"], ["y_shape"]))
    graph.output[0].CopyFrom(helper.make_tensor_value_info("y_shape", TensorProto.INT64, [3]))
    feeds = {f"{name}_shape": np.array(shape) for name, shape in shapes.items()}
    assert session(model).run(None, feeds)[0].tolist() == [0, 2**62, 1]


def test_heads_of_huge_sizes_are_refused() -> None:
    """Tensors without rows use no memory, but products of their other dimensions could overflow."""
    with pytest.raises(Exception, match="expected at most 16777216"):
        session(attention_model(4, packed=True, mask=False)).run(
            None, {"query": np.zeros((0, 1, 12 * HUGE), np.float32)}
        )
    setup = Setup(packed=True, lengths=False)
    feeds = Decoder(setup).call(1).feeds | {"query": np.zeros((0, 1, 8 * HUGE), np.float32)}
    with pytest.raises(Exception, match="expected at most 16777216"):
        session(node_model(setup)).run(None, feeds)


@pytest.mark.parametrize("causal", [False, True])
def test_the_plan_gives_what_the_operator_gives(causal: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 70, heads, 32), dtype=np.float32) for heads in (4, 2, 2))
    feeds = {"query": q.reshape(2, 70, -1), "key": k.reshape(2, 70, -1), "value": v.reshape(2, 70, -1)}
    model = attention_model(4, 2, mask=np.zeros(1, np.float32), causal=int(causal), scale=0.25)
    expected = session(model).run(None, feeds)[0]
    for threads in (1, 3):
        y = _testing.run_attention_plan(q, k, v, 0.25, causal=causal, threads=threads)
        np.testing.assert_array_equal(y.reshape(expected.shape), expected)


def test_the_plan_says_that_there_is_no_memory() -> None:
    rows = np.zeros((1, 300, 8, 64), np.float32)
    for threads in (1, 2):
        with pytest.raises(MemoryError):
            _testing.run_attention_plan(rows, rows, rows, 1.0, threads=threads, most_bytes=1000)
