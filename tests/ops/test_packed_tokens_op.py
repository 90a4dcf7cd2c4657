"""Test PackTokens and UnpackTokens in ORT: against NumPy and their ONNX functions, and on invalid input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ortolan.graph_passes.operators.packed_tokens import PACK, UNPACK

from ..sampling import examples
from .packed_tokens import Kept, expected, node_model, packed, random_kept, random_x, unpacked
from .single_node import at_odd_address, save_at_odd_places, session, with_constants

TYPES = [np.float32, np.float64, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_]
TYPES += [np.uint16, np.uint32, np.uint64]
# Types that ONNX Runtime's Expand, used by the functions, supports.
IN_BODY = [one for one in TYPES if one not in (np.int16, np.uint16)]
both = pytest.mark.parametrize("op_type", [PACK, UNPACK])

MASKS = {
    "all": [[1, 1, 1, 1], [1, 1, 1, 1]],
    "none": [[0, 0, 0, 0], [0, 0, 0, 0]],
    "behind": [[1, 1, 1, 0], [1, 0, 0, 0]],
    "in front": [[0, 0, 1, 1], [0, 1, 1, 1]],
    "gaps": [[1, 0, 1, 1], [0, 1, 0, 1]],
    "an empty sequence in front": [[0, 0, 0, 0], [0, 1, 1, 1]],
    "an empty sequence behind": [[1, 1, 1, 0], [0, 0, 0, 0]],
    "empty sequences between": [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]],
    "other numbers": [[2, -1, 2**40, 0], [0, -(2**63), 2**63 - 1, 2**32]],
}


def same_bytes(found: np.ndarray, wanted: np.ndarray) -> None:
    """Check for equal types, shapes and bits, including NaN payloads."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


def x_of(op_type: str, kept: Kept, rest: tuple[int, ...], rng: np.random.Generator, x_type: type = np.float32):
    shape = kept.shape if op_type == PACK else (1, np.count_nonzero(kept))
    return random_x(rng, (*shape, *rest), x_type)


@both
@pytest.mark.parametrize("mask", MASKS)
def test_kernel_and_function_body_do_the_same(op_type: str, mask: str) -> None:
    kept, rng = np.array(MASKS[mask], np.int64), np.random.default_rng(1)
    for rest in ((), (5,), (3, 2), (1,)):
        model = node_model(op_type, 2 + len(rest))
        onnx.checker.check_model(model)
        x = x_of(op_type, kept, rest, rng)
        for library in (True, False):
            (y,) = session(model, library=library).run(None, {"kept": kept, "X": x})
            same_bytes(y, expected(op_type, kept, x))


@pytest.mark.parametrize("x_type", TYPES)
def test_any_numbers_are_packed(x_type: type) -> None:
    rng = np.random.default_rng(2)
    kept = random_kept(rng, 3, 17)
    for rest in ((), (7,), (2, 3)):
        x = random_x(rng, (3, 17, *rest), x_type)
        for library in (True, False) if x_type in IN_BODY else (True,):
            (y,) = session(node_model(PACK, x.ndim, x_type), library=library).run(None, {"kept": kept, "X": x})
            same_bytes(y, packed(kept, x))


def test_bfloat16_is_packed() -> None:
    """NumPy lacks bfloat16, so the model casts its input to bfloat16 and its output back."""
    model = node_model(PACK)
    casts = [
        helper.make_node("Cast", ["X"], ["X16"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["Y16"], ["Y"], to=TensorProto.FLOAT),
    ]
    node = model.graph.node[0]
    node.input[1], node.output[0] = "X16", "Y16"
    nodes = [casts[0], node, casts[1]]
    copies = [onnx.NodeProto.FromString(one.SerializeToString()) for one in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    rng = np.random.default_rng(3)
    kept, x = random_kept(rng, 2, 9), rng.integers(-100, 100, (2, 9, 4)).astype(np.float32)
    (y,) = session(model).run(None, {"kept": kept, "X": x})
    same_bytes(y, packed(kept, x))


@examples(150)
@given(
    batch=st.integers(0, 4),
    tokens=st.integers(0, 40),
    rest=st.lists(st.integers(0, 5), max_size=2),
    one=st.sampled_from([(), (0,), (1,), (0, 1)]),
    density=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    x_type=st.sampled_from(IN_BODY),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(batch, tokens, rest, one, density, x_type, seed) -> None:
    """Any shapes, sparsity and types of X.

    one: axes of X that have size 1 and broadcast over sequences or tokens.
    """
    rng = np.random.default_rng(seed)
    kept = random_kept(rng, batch, tokens, density)
    shape = [1 if axis in one else size for axis, size in enumerate(kept.shape)]
    x = random_x(rng, (*shape, *rest), x_type)
    y = packed(kept, x)
    for library in (True, False):
        same_bytes(session(node_model(PACK, x.ndim, x_type), library=library).run(None, {"kept": kept, "X": x})[0], y)
        if x_type is np.float32:
            back = session(node_model(UNPACK, x.ndim), library=library).run(None, {"kept": kept, "X": y})[0]
            same_bytes(back, unpacked(kept, y))


@both
@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23])
def test_function_body_serves_every_opset_and_evaluator(op_type: str, opset: int) -> None:
    rng, kept = np.random.default_rng(4), np.array(MASKS["gaps"], np.int64)
    x = x_of(op_type, kept, (3,), rng)
    model, feeds = node_model(op_type, opset=opset), {"kept": kept, "X": x}
    for y in (session(model, library=False).run(None, feeds)[0], ReferenceEvaluator(model).run(None, feeds)[0]):
        same_bytes(y, expected(op_type, kept, x))


@both
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(op_type: str, threads: int) -> None:
    """Enough work for several threads, divided inside sequences; some sequences are empty."""
    rng = np.random.default_rng(5)
    for batch, tokens, width, density in (
        (9, 700, 300, 0.7),
        (2, 9000, 40, 0.99),
        (400, 30, 60, 0.1),
        (3, 5, 200000, 1),
    ):
        kept = random_kept(rng, batch, tokens, density)
        kept[rng.integers(0, batch)] = 0
        x = x_of(op_type, kept, (width,), rng)
        (y,) = session(node_model(op_type), threads=threads).run(None, {"kept": kept, "X": x})
        same_bytes(y, expected(op_type, kept, x))


@both
def test_memory_at_odd_addresses(op_type: str, tmp_path: Path) -> None:
    """Feeds and constants may be at unaligned addresses."""
    rng = np.random.default_rng(6)
    kept = random_kept(rng, 3, 11)
    feeds = {"kept": kept, "X": x_of(op_type, kept, (70,), rng)}
    y = expected(op_type, kept, feeds["X"])
    odd = {name: at_odd_address(array) for name, array in feeds.items()}
    same_bytes(session(node_model(op_type)).run(None, odd)[0], y)
    for names in (["kept"], ["X"]):
        constants = {name: feeds[name] for name in names}
        save_at_odd_places(with_constants(node_model(op_type), constants), tmp_path)
        given_feeds = {name: array for name, array in feeds.items() if name not in names}
        same_bytes(session(tmp_path / "model.onnx").run(None, given_feeds)[0], y)


def test_shapes_that_are_not_known() -> None:
    rng = np.random.default_rng(7)
    kept = random_kept(rng, 2, 6)
    for op_type in (PACK, UNPACK):
        model = node_model(op_type)
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.ClearField("shape")
        x = x_of(op_type, kept, (4,), rng)
        same_bytes(session(model).run(None, {"kept": kept, "X": x})[0], expected(op_type, kept, x))


@both
@pytest.mark.parametrize("shape", [(), (6,), (2, 3, 1)])
def test_kept_of_another_rank(op_type: str, shape: tuple[int, ...]) -> None:
    model = node_model(op_type, kept_rank=len(shape))
    text = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(
        Exception, match=rf"{op_type} node 'tokens': kept 'kept' has shape {text}, expected \[batch, to"
    ):
        session(model).run(None, {"kept": np.ones(shape, np.int64), "X": np.zeros((1, 6, 2), np.float32)})


@pytest.mark.parametrize("shape", [(3, 5, 2), (2, 4, 2), (2, 0, 2), (0, 5, 2), (5, 2, 3), (10, 1)])
def test_x_that_does_not_fit(shape: tuple[int, ...]) -> None:
    text = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    message = rf"PackTokens node 'tokens': X has shape {text}, expected \[2 or 1, 5 or 1, ...\], like kept"
    with pytest.raises(Exception, match=message):
        session(node_model(PACK, len(shape))).run(
            None, {"kept": np.ones((2, 5), np.int64), "X": np.zeros(shape, np.float32)}
        )


@both
@pytest.mark.parametrize("shape", [(), (4,)])
def test_x_without_tokens(op_type: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(Exception, match=rf"{op_type} node 'tokens': X has shape .*, expected \["):
        session(node_model(op_type, len(shape))).run(
            None, {"kept": np.ones((1, 4), np.int64), "X": np.zeros(shape, np.float32)}
        )


@pytest.mark.parametrize("shape", [(1, 2, 4), (1, 4, 4), (2, 3, 4), (0, 3, 4), (3, 1, 4), (1, 0, 4)])
def test_another_number_of_rows(shape: tuple[int, ...]) -> None:
    text = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    message = rf"UnpackTokens node 'tokens': X has shape {text}, expected \[1, 3, ...\], one row for each kept token"
    with pytest.raises(Exception, match=message):
        session(node_model(UNPACK)).run(
            None, {"kept": np.array([[1, 1, 0], [0, 0, 1]]), "X": np.zeros(shape, np.float32)}
        )


@both
def test_too_many_empty_sequences_are_refused(op_type: str) -> None:
    """Empty tensors use no memory, so their dimensions may have any size."""
    feeds = {"kept": np.zeros((2**40, 0), np.int64), "X": np.zeros((1, 0, 4), np.float32)}
    with pytest.raises(Exception, match=r"kept 'kept' has 1099511627776 sequences, expected at most 16777216"):
        session(node_model(op_type)).run(None, feeds)


def test_texts_are_refused() -> None:
    x = np.array([["a", "b"]], object)
    model = node_model(PACK, 2)
    for value in (model.graph.input[1], model.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.STRING
    with pytest.raises(Exception, match="PackTokens node 'tokens': X has element type 8, expected a numeric type"):
        session(model).run(None, {"kept": np.ones((1, 2), np.int64), "X": x})


@pytest.mark.parametrize("name", ["kept", "X"])
def test_unpack_tokens_refuses_other_types(name: str) -> None:
    model = node_model(UNPACK)
    del model.functions[:]
    model.graph.input[name == "X"].type.tensor_type.elem_type = TensorProto.INT32
    with pytest.raises(Exception, match="tokens"):
        session(model)
