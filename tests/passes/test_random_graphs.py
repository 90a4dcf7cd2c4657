"""Random graphs of linear layers, activations, sums and norms: optimized models have the same answers."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import ortolan
from ortolan import Recipe

from ..recipes.forms import NAMED
from ..sampling import examples
from .small_models import FAST, make_model, op_types, random_weight, relative_error, run

WIDTH = 32
RECIPES = ["sparse-bf16", "sparse-int8", "sparse-int4", "sparse-int8-4x1"]
SHAPES: dict[str, list[int]] = {"row": [WIDTH], "one": [1], "number": [], "zero": [1, 1], "column": [3, 1]}


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Draw a graph with input x [3, 32] whose output y is the result of a few random steps.

    Weights and values may be shared, values may be outputs, and a second operand may be a constant of any shape that
    broadcasts.
    """
    batch = 3
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in SHAPES.items()}
    weights["zero"][:] = 0
    weights |= {f"W{index}": random_weight(WIDTH, WIDTH, seed=int(rng.integers(1000))) for index in range(3)}
    weights |= {"b": rng.standard_normal(WIDTH).astype(np.float32)}
    nodes, values, shown = [], ["x"], set()
    linears = 0
    for index in range(draw(st.integers(2, 9))):
        source = values[-1] if draw(st.booleans()) else draw(st.sampled_from(values))
        output, name = f"v{index}", f"node{index}"
        match draw(
            st.sampled_from(["linear", "linear", "linear", "bias", "activation", "activation", "add", "add", "norm"])
        ):
            case "linear":
                nodes.append(helper.make_node("MatMul", [source, f"W{draw(st.integers(0, 2))}"], [output], name))
                linears += 1
            case "bias":
                nodes.append(helper.make_node("Gemm", [source, "W0", "b"], [output], name))
                linears += 1
            case "activation":
                op, domain = draw(
                    st.sampled_from(
                        [("Relu", ""), ("Tanh", ""), ("Gelu", "com.microsoft"), ("FastGelu", "com.microsoft")]
                    )
                )
                nodes.append(helper.make_node(op, [source], [output], name, domain=domain))
            case "norm":
                weight, bias = draw(st.sampled_from(["row", "b"])), draw(st.sampled_from([[], ["row"], ["b"]]))
                nodes.append(helper.make_node("LayerNormalization", [source, weight, *bias], [output], name))
            case _:
                operands = [source, draw(st.sampled_from([*values, *SHAPES]))]
                nodes.append(helper.make_node("Add", draw(st.permutations(operands)), [output], name))
        values.append(output)
        if draw(st.integers(0, 5)) == 0:
            shown.add(output)
    if not linears:
        nodes.append(helper.make_node("MatMul", [values[-1], "W0"], ["last"], "last"))
        values.append("last")
    outputs = sorted(shown | {values[-1]})
    used = {name for node in nodes for name in node.input}
    return make_model(
        nodes,
        {"x": (TensorProto.FLOAT, [batch, WIDTH])},
        {name: (TensorProto.FLOAT, [batch, WIDTH]) for name in outputs},
        {name: array for name, array in weights.items() if name in used},
        domains={"com.microsoft": 1},
    )


# Errors vary widely between graphs, so every run must use the same graphs.
@examples(25, derandomize=True)
@given(graphs(), st.sampled_from(RECIPES), st.lists(st.sampled_from(["node0", "node[1-3]", "W1"]), max_size=1))
def test_random_graphs_answer_as_their_rounded_selves(model: onnx.ModelProto, recipe: str, exclude: list[str]) -> None:
    options = dict(FAST)
    if recipe in ("sparse-int8", "sparse-int4"):  # only these recipes quantize float layers
        options["quantize.exclude"] = exclude
    report = ortolan.optimize_onnx(model, recipe=NAMED[recipe], options=options)
    onnx.checker.check_model(report.model, full_check=True)
    assert "MatMul" not in op_types(report.model) and "Gemm" not in op_types(report.model)
    chosen = NAMED[recipe].with_options(options).to_dict()
    steps = [step for step in chosen["pass"] if step["name"] in ("normalize", "prune", "quantize")]
    rounded = ortolan.optimize_onnx(model, recipe=Recipe.from_dict({"name": "rounded", "pass": steps})).model
    feeds = {"x": np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)}
    kernels, alone, expected = (
        run(report.model, feeds, library=True),
        run(report.model, feeds),
        run(rounded, feeds),
    )
    for kernel, portable, reference in zip(kernels, alone, expected, strict=True):
        assert kernel.shape == portable.shape == reference.shape
        assert relative_error(portable, kernel) < 0.03
        assert relative_error(reference, kernel) < 0.06
