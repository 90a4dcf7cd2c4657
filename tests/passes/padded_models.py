"""Small encoders with an attention_mask, with and without pass unpad, and masks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import OptimizationReport, Recipe

from .attention_graphs import Graph, W
from .small_models import optimize, run

Feeds = dict[str, np.ndarray]

MASKS = {
    "behind": [[1] * 9, [1] * 4 + [0] * 5, [1] * 8 + [0], [1] + [0] * 8],
    "in front": [[1] * 9, [0] * 5 + [1] * 4, [0] + [1] * 8, [0] * 8 + [1]],
    "gaps": [[1, 0, 1, 1, 0, 0, 1, 0, 1], [0, 1, 1, 0, 1, 1, 1, 0, 0], [1] * 9, [1, 1, 0, 0, 0, 0, 0, 0, 1]],
    "none": [[1] * 9] * 4,
}


PAD = 1  # the padding token's id


def with_unpad(recipe: Recipe, **options: Any) -> Recipe:
    """Return the recipe with pass unpad, once and with these options."""
    return recipe.without_pass("unpad").with_pass("unpad", **(options or {"pad_token_id": PAD}))


def both(
    model: onnx.ModelProto, recipe: Recipe, unpad: Mapping[str, Any] | None = None, **arguments: Any
) -> tuple[onnx.ModelProto, OptimizationReport]:
    """Return the model optimized without pass unpad, and the report of the same recipe with pass unpad.

    unpad: options of the pass.
    """
    padded = optimize(model, recipe=recipe.without_pass("unpad"), **arguments).model
    assert padded is not None
    return padded, optimize(model, recipe=with_unpad(recipe, **(unpad or {})), **arguments)


def changed(report: OptimizationReport) -> onnx.ModelProto:
    """Check that the report's model packs its tokens, and return it."""
    assert report.model is not None
    left = {node.op_type for node in report.model.graph.node}
    assert "NoMADAttention" not in left and {"PackTokens", "PackedNoMADAttention"} <= left, report.notes
    assert any(note.startswith("padding is skipped: ") for note in report.notes)
    onnx.checker.check_model(report.model)
    return report.model


def reason(report: OptimizationReport) -> str:
    """Return the reason why pass unpad did not change the model."""
    assert report.model is not None
    assert not {"PackTokens", "UnpackTokens", "PackedNoMADAttention"} & {
        node.op_type for node in report.model.graph.node
    }
    (note,) = (note for note in report.notes if note.startswith("padding is not skipped: "))
    return note.removeprefix("padding is not skipped: ")


def encoder_feeds(model: onnx.ModelProto, mask: Any, seed: int = 0) -> Feeds:
    """Return random token ids where the mask is set, the padding id elsewhere."""
    mask = np.array(mask, np.int64)
    rng = np.random.default_rng(seed)
    given: Feeds = {
        "input_ids": np.where(mask != 0, rng.integers(2, 90, mask.shape), PAD),
        "attention_mask": mask,
        "token_type_ids": rng.integers(0, 2, mask.shape),
        "position_ids": rng.integers(0, 50, mask.shape),
        "x": rng.standard_normal((*mask.shape, W), dtype=np.float32),
    }
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    return {name: given[name].astype(helper.tensor_dtype_to_np_dtype(kind)) for name, kind in types.items()}


def add_nodes(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    outputs: Mapping[str, Sequence[int | str] | None],
    weights: Mapping[str, np.ndarray] | None = None,
    keep: bool = False,
) -> onnx.ModelProto:
    """Append the nodes to the model. The model's own outputs are kept if `keep` is set."""
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (weights or {}).items())
    if not keep:
        del model.graph.output[:]
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()
    )
    return model


def masked_mean(model: onnx.ModelProto, hidden: str = "last_hidden_state", keep: bool = False) -> onnx.ModelProto:
    """Mean pooling as sentence-transformers exports it: the mask is expanded to the shape of the hidden state."""
    make = helper.make_node
    nodes = [
        make("Unsqueeze", ["attention_mask", "pool.last"], ["pool.column"]),
        make("Shape", [hidden], ["pool.shape"]),
        make("Expand", ["pool.column", "pool.shape"], ["pool.expanded"]),
        make("Cast", ["pool.expanded"], ["pool.factor"], to=TensorProto.FLOAT),
        make("Mul", [hidden, "pool.factor"], ["pool.product"]),
        make("ReduceSum", ["pool.product", "pool.tokens"], ["pool.sum"], keepdims=0),
        make("ReduceSum", ["pool.factor", "pool.tokens"], ["pool.count"], keepdims=0),
        make("Clip", ["pool.count", "pool.least"], ["pool.divisor"]),
        make("Div", ["pool.sum", "pool.divisor"], ["pooled"]),
    ]
    weights = {
        "pool.last": np.array([-1]),
        "pool.tokens": np.array([1]),
        "pool.least": np.array(1e-9, np.float32),
    }
    return add_nodes(model, nodes, {"pooled": ["batch", 48]}, weights, keep)


def first_token(
    model: onnx.ModelProto, hidden: str = "last_hidden_state", by: str = "Gather", keep: bool = False
) -> onnx.ModelProto:
    """BERT's pooler: a linear layer and Tanh on the first token."""
    make = helper.make_node
    weights = {"pool.weight": np.random.default_rng(3).standard_normal((48, 48), np.float32) / 7}
    if by == "Gather":
        taken = [make("Gather", [hidden, "pool.zero"], ["pool.first"], axis=1)]
        weights["pool.zero"] = np.array(0)
    else:
        taken = [
            make("Slice", [hidden, "pool.zero", "pool.one", "pool.one"], ["pool.row"]),
            make("Squeeze", ["pool.row", "pool.one"], ["pool.first"]),
        ]
        weights |= {"pool.zero": np.array([0]), "pool.one": np.array([1])}
    nodes = [*taken, make("MatMul", ["pool.first", "pool.weight"], ["pool.y"]), make("Tanh", ["pool.y"], ["pooled"])]
    return add_nodes(model, nodes, {"pooled": ["batch", 48]}, weights, keep)


def attention_model(form: Callable[[Graph], str], kind: int = TensorProto.INT64) -> onnx.ModelProto:
    """Return a model of a form of attention_forms with an input attention_mask of this element type."""
    graph = Graph()
    model = graph.model(form(graph))
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == "mask":
                node.input[index] = "attention_mask"
    for value in model.graph.input:
        if value.name == "mask":
            value.name = "attention_mask"
            value.type.tensor_type.elem_type = kind
    return model


def fuse_and_unpad(model: onnx.ModelProto, **options: Any) -> OptimizationReport:
    """Run only fuse_attention and unpad, with verification."""
    steps = [{"name": "normalize"}, {"name": "fuse_attention"}, {"name": "unpad", "drop_hidden": True}]
    recipe = Recipe.from_dict({"name": "unpadded", "pass": [*steps, {"name": "verify", "seconds": 0.0}]})
    return ortolan.optimize_onnx(model, recipe=recipe, **options)


def proto(model: ir.Model) -> onnx.ModelProto:
    return ir.to_proto(model)


def assert_zero_elsewhere(found: np.ndarray, mask: np.ndarray) -> None:
    assert not found[np.asarray(mask) == 0].any()


def answers(model: onnx.ModelProto, given: Feeds) -> list[np.ndarray]:
    return run(model, given, library=True)


def as_written(model: onnx.ModelProto, given: Feeds) -> list[np.ndarray]:
    """Run the nodes as written, because ONNX Runtime's fusions would sum in a different order."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    ortolan.register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, given)
