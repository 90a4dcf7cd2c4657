"""keep_last_logits: several forms of heads give the last row of all logits; errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan.errors import ModelError, OutputError
from ortolan.generate import Decoder

from ..passes.cached_llama import llama

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def steps(path: Path, *parts: list[int]) -> list[np.ndarray]:
    decoder = Decoder(ortolan.create_session(path))
    return [decoder.step(part) for part in parts]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoder") / "model.onnx"
    onnx.save(llama("gqa"), path)
    return path


@pytest.mark.parametrize("choices", [None, {"weights": "int8"}, {"weights": "int4"}])
@pytest.mark.parametrize("first", ["optimize", "keep"])
def test_its_logits_are_the_last_row_of_all(decoder: Path, tmp_path: Path, choices: Any, first: str) -> None:
    def make(path: Path, *ways: Callable[[Path, Path], object]) -> Path:
        for number, way in enumerate(ways):
            way(path, path := tmp_path / f"{len(ways)}{number}.onnx")
        return path

    def optimize(source: Path, target: Path) -> None:
        if choices is None:
            target.write_bytes(source.read_bytes())
        else:
            ortolan.optimize_onnx(source, target, **choices)

    keep = ortolan.keep_last_logits
    every = make(decoder, optimize)
    last = make(decoder, *((optimize, keep) if first == "optimize" else (keep, optimize)))
    (prompt, step), (one, same) = steps(every, IDS, [7]), steps(last, IDS, [7])
    assert one.shape == (1, prompt.shape[1])
    np.testing.assert_array_equal(one, prompt[-1:])
    np.testing.assert_array_equal(same, step)


def head(*nodes: onnx.NodeProto, shape: list[Any], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "head",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "tokens", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


LOGITS = ["batch", "tokens", 6]
PRODUCT = helper.make_node("MatMul", ["x", "w"], ["product"], "head")
WEIGHT = {"w": np.random.default_rng(0).standard_normal((4, 6), np.float32)}


def constant(name: str, number: float) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(number, np.float32)))


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        ([helper.make_node("Add", ["product", "b"], ["logits"])], {"b": np.ones(6, np.float32)}),
        (
            [  # some decoders cap their logits with Tanh
                helper.make_node("Div", ["product", "c"], ["small"]),
                helper.make_node("Tanh", ["small"], ["bounded"]),
                helper.make_node("Mul", ["bounded", "c"], ["logits"]),
            ],
            {"c": np.float32(30.0).reshape(())},
        ),
        ([helper.make_node("Add", ["b", "product"], ["logits"])], {"b": np.arange(6, dtype=np.float32)}),
        (
            [  # the same, with constants stored as nodes
                constant("least", 0.25),
                constant("most", 4.0),
                helper.make_node("Mul", ["least", "product"], ["small"]),
                helper.make_node("Tanh", ["small"], ["bounded"]),
                helper.make_node("Mul", ["bounded", "most"], ["scaled"]),
                helper.make_node("Sub", ["most", "scaled"], ["logits"]),
            ],
            {},
        ),
    ],
)
def test_what_stands_behind_the_head(tmp_path: Path, nodes: list[Any], constants: dict[str, np.ndarray]) -> None:
    model = head(PRODUCT, *nodes, shape=LOGITS, constants=WEIGHT | constants)
    onnx.save(model, tmp_path / "all.onnx")
    ortolan.keep_last_logits(tmp_path / "all.onnx", tmp_path / "last.onnx")
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 5, 4), np.float32)}
    every, last = (ortolan.create_session(tmp_path / f"{name}.onnx").run(None, feeds)[0] for name in ("all", "last"))
    np.testing.assert_array_equal(last, every[:, -1:])
    assert ir.load(tmp_path / "last.onnx").graph.outputs[0].shape == ("batch", 1, 6)


@pytest.mark.parametrize(
    ("nodes", "shape", "constants", "message"),
    [
        (
            [PRODUCT, helper.make_node("Softmax", ["product"], ["logits"], "odd")],
            LOGITS,
            {},
            "come from node 'odd', a Softmax, expected a matrix product",
        ),
        (
            [PRODUCT, helper.make_node("Mul", ["product", "m"], ["logits"], "by_token")],
            LOGITS,
            {"m": np.ones((5, 1), np.float32)},
            "come from node 'by_token', a Mul",
        ),
        (
            [PRODUCT, helper.make_node("Mul", ["m", "product"], ["logits"], "by_token")],
            LOGITS,
            {"m": np.ones((5, 1), np.float32)},
            "come from node 'by_token', a Mul",
        ),
        (
            [PRODUCT, helper.make_node("Mul", ["product", "product"], ["logits"], "square")],
            LOGITS,
            {},
            "come from node 'square', a Mul",
        ),
        (
            [
                PRODUCT,
                helper.make_node("MatMul", ["x", "w"], ["other"]),
                helper.make_node("Add", ["product", "other"], ["logits"], "both"),
            ],
            LOGITS,
            {},
            "come from node 'both', an? Add",
        ),
        (
            [
                constant("one", 1.0),
                constant("two", 2.0),
                helper.make_node("Add", ["one", "two"], ["logits"], "constants"),
            ],
            LOGITS,
            {},
            "come from node 'constants', an? Add",
        ),
        (
            [helper.make_node("MatMul", ["w", "x"], ["logits"], "turned")],
            LOGITS,
            {},
            r"the first input of .* head 'turned' is 'w' of shape \[4,6\], expected \[batch, tokens, width\]",
        ),
        (
            [helper.make_node("MatMul", ["x", "w"], ["logits"])],
            ["batch", 1, 6],
            {},
            "already returns the logits of one token",
        ),
        ([helper.make_node("MatMul", ["x", "w"], ["logits"])], ["batch", 6], {}, r"expected one 'logits' of shape"),
        ([helper.make_node("Identity", ["x"], ["logits"])], ["batch", "tokens", 4], {}, "come from an input"),
    ],
)
def test_what_it_refuses(tmp_path: Path, nodes: list[Any], shape: list[Any], constants: Any, message: str) -> None:
    onnx.save(head(*nodes, shape=shape, constants=WEIGHT | constants), tmp_path / "all.onnx")
    with pytest.raises(ModelError, match=message):
        ortolan.keep_last_logits(tmp_path / "all.onnx", tmp_path / "last.onnx")
    assert not (tmp_path / "last.onnx").exists()


def test_what_else_reads_the_logits_is_refused(tmp_path: Path) -> None:
    model = head(helper.make_node("MatMul", ["x", "w"], ["logits"]), shape=LOGITS, constants=WEIGHT)
    model.graph.node.append(helper.make_node("Softmax", ["logits"], ["chances"], "reader"))
    model.graph.output.append(helper.make_tensor_value_info("chances", TensorProto.FLOAT, LOGITS))
    onnx.save(model, tmp_path / "all.onnx")
    with pytest.raises(ModelError, match="node 'reader', a Softmax, reads it"):
        ortolan.keep_last_logits(tmp_path / "all.onnx", tmp_path / "last.onnx")


def test_the_input_is_not_overwritten(decoder: Path) -> None:
    with pytest.raises(OutputError, match="would overwrite"):
        ortolan.keep_last_logits(decoder, decoder)
