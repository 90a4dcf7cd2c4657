"""The LayerNormalization after a linear layer is fused with the same answers; other graphs are not matched."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortolan import OptimizationReport, Recipe
from ortolan.graph_passes.find.epilogue import Activation, Epilogue, Epilogues
from ortolan.graph_passes.find.linear import linears_in
from ortolan.models import tiny

from ..recipes.forms import NAMED
from ..sampling import examples
from .epilogues import gelu_torch, run_unoptimized
from .small_models import make_model, op_types, optimize, random_weight, relative_error, run

FLOAT = TensorProto.FLOAT
K, N = 12, 40
EPSILON = 1e-3  # large enough to affect the results
GAMMA, BETA = 1 + random_weight(N, seed=2), random_weight(N, seed=3)
LAYER_ERROR = 0.03  # error bound of uint8 inputs and int8 weights


class Writer:
    """Builds the nodes after the linear layer y = x W + b with x [batch, K]."""

    def __init__(self, opset: int = 17) -> None:
        self.opset = opset
        self.nodes = [helper.make_node("Gemm", ["x", "W", "b"], ["y"], name="layer")]
        self.weights = {"W": random_weight(K, N), "b": random_weight(N, seed=1), "gamma": GAMMA, "beta": BETA}
        self.inputs: dict[str, tuple[int, list[int | str]]] = {"x": (FLOAT, ["batch", K])}

    def node(self, op: str, *operands: str | float, **attributes: object) -> str:
        names = [value if isinstance(value, str) else self.constant(np.float32(value)) for value in operands]
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [output], name=f"node_{output}", **attributes))
        return output

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.weights)}"
        self.weights[name] = np.asarray(array)
        return name

    def mean(self, x: str, axes: tuple[int, ...] = (-1,), keepdims: int = 1) -> str:
        if self.opset >= 18:
            return self.node("ReduceMean", x, self.constant(np.array(axes)), keepdims=keepdims)
        return self.node("ReduceMean", x, axes=list(axes), keepdims=keepdims)

    def residual(self, x: str, *shape: int | str) -> str:
        self.inputs["r"] = (FLOAT, list(shape) or ["batch", N])
        return self.node("Add", x, "r")

    def model(self, *outputs: str, rank: int = 2) -> onnx.ModelProto:
        used = {name for node in self.nodes for name in node.input}
        return make_model(
            self.nodes,
            self.inputs,
            {name: (FLOAT, [f"{name}_{axis}" for axis in range(rank)]) for name in outputs},
            {name: array for name, array in self.weights.items() if name in used},
            opset=self.opset,
        )


Form = Callable[[Writer, str], str]


def operator(w: Writer, x: str) -> str:
    return w.node("LayerNormalization", x, "gamma", "beta", epsilon=EPSILON)


def operator_of_axis_1(w: Writer, x: str) -> str:
    return w.node("LayerNormalization", x, "gamma", "beta", axis=1, epsilon=EPSILON, stash_type=1)


def operator_without_bias(w: Writer, x: str) -> str:
    return w.node("LayerNormalization", x, "gamma", axis=-1, epsilon=EPSILON)


def _end(w: Writer, d: str, square: str) -> str:
    return w.node("Div", d, w.node("Sqrt", w.node("Add", w.mean(square), EPSILON)))


def torch_script(w: Writer, x: str) -> str:
    d = w.node("Sub", x, w.mean(x))
    return w.node("Add", w.node("Mul", _end(w, d, w.node("Pow", d, 2.0)), "gamma"), "beta")


def square_by_product(w: Writer, x: str) -> str:
    d = w.node("Sub", x, w.mean(x))
    return w.node("Add", w.node("Mul", _end(w, d, w.node("Mul", d, d)), "gamma"), "beta")


def operands_the_other_way_round(w: Writer, x: str) -> str:
    d = w.node("Sub", x, w.mean(x))
    root = w.node("Sqrt", w.node("Add", EPSILON, w.mean(w.node("Pow", d, 2.0))))
    return w.node("Add", "beta", w.node("Mul", "gamma", w.node("Div", d, root)))


def formula_without_bias(w: Writer, x: str) -> str:
    d = w.node("Sub", x, w.mean(x))
    return w.node("Mul", _end(w, d, w.node("Pow", d, 2.0)), "gamma")


FORMULAS: list[Form] = [torch_script, square_by_product, operands_the_other_way_round, formula_without_bias]
FORMS: list[Form] = [operator, operator_of_axis_1, operator_without_bias, *FORMULAS]
WITHOUT_BIAS = (operator_without_bias, formula_without_bias)
all_forms = pytest.mark.parametrize("form", FORMS)


def find(model: onnx.ModelProto) -> Epilogue:
    """Return the epilogue of the model's first layer."""
    return Epilogues().of(next(linears_in(ir.from_proto(model))))


def normalized(x: np.ndarray, epsilon: float = EPSILON, bias: bool = True) -> np.ndarray:
    x = x.astype(np.float64)
    z = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + epsilon)
    result: np.ndarray = z * GAMMA + (BETA if bias else 0)
    return result


def some_feeds(w: Writer, rows: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        name: rng.standard_normal([rows if isinstance(dim, str) else dim for dim in shape]).astype(np.float32)
        for name, (_, shape) in w.inputs.items()
    }


@all_forms
@pytest.mark.parametrize("opset", [17, 18, 21])
@pytest.mark.parametrize("residual", [False, True])
def test_every_form_is_found(form: Form, opset: int, residual: bool) -> None:
    w = Writer(opset)
    output = form(w, w.residual("y") if residual else "y")
    model = w.model(output)
    found = find(model)
    assert found.norm is not None and found.output.name == output
    assert [node.name for node in found.nodes] == [node.name for node in w.nodes[1:]]
    assert (found.residual is not None) == residual and found.activation == Activation.NONE
    assert found.norm.weight.name == "gamma" and math.isclose(found.norm.epsilon, EPSILON, rel_tol=1e-6)
    assert (found.norm.bias is None) == (form in WITHOUT_BIAS)
    feeds = some_feeds(w)
    y = feeds["x"] @ w.weights["W"] + w.weights["b"] + feeds.get("r", 0)
    expected = normalized(y, bias=form not in WITHOUT_BIAS)
    np.testing.assert_allclose(run_unoptimized(model, feeds)[0], expected, rtol=1e-4, atol=1e-5)


def test_the_default_epsilon() -> None:
    w = Writer()
    found = find(w.model(w.node("LayerNormalization", "y", "gamma", "beta")))
    assert found.norm is not None and found.norm.epsilon == np.float32(1e-5)


def test_behind_an_activation() -> None:
    w = Writer()
    found = find(w.model(torch_script(w, w.residual(gelu_torch(w, "y")))))
    assert found.norm is not None and found.residual is not None and found.activation == Activation.GELU


@all_forms
def test_values_that_others_see_stay(form: Form) -> None:
    w = Writer()
    total = w.residual("y")
    output = form(w, total)
    found = find(w.model(output))
    assert found.norm is not None
    inside = [name for node in w.nodes[1:] for name in node.output if name != output]
    for value in inside:
        as_output = find(w.model(output, value))
        w.nodes.append(helper.make_node("Neg", [value], ["negative"]))
        consumed = find(w.model(output, "negative"))
        w.nodes.pop()
        for other in (as_output, consumed):
            if form not in WITHOUT_BIAS and form in FORMULAS and value == inside[-1]:
                # Only the final Add of the bias stays separate.
                assert other.norm is not None and other.output.name == value
            else:
                assert other.norm is None


@all_forms
def test_the_result_may_have_consumers_and_be_an_output(form: Form) -> None:
    w = Writer()
    output = form(w, w.residual("y"))
    w.nodes += [helper.make_node("Add", [output, output], ["double"]), helper.make_node("Neg", [output], ["negative"])]
    found = find(w.model("double", "negative", output))
    assert found.norm is not None and found.output.name == output


def test_an_addition_behind_the_product_that_is_no_bias() -> None:
    w = Writer()
    product = formula_without_bias(w, "y")
    found = find(w.model(w.residual(product)))
    assert found.norm is not None and found.norm.bias is None and found.output.name == product


OTHERS: dict[str, Form] = {
    "of the first axis": lambda w, x: w.node("LayerNormalization", x, "gamma", "beta", axis=0),
    "in bfloat16": lambda w, x: w.node("LayerNormalization", x, "gamma", "beta", stash_type=16),
    "one weight": lambda w, x: w.node("LayerNormalization", x, w.constant(GAMMA[:1]), "beta"),
    "one bias": lambda w, x: w.node("LayerNormalization", x, "gamma", w.constant(BETA[:1])),
    "weights with another axis": lambda w, x: w.node("LayerNormalization", x, w.constant(GAMMA[None]), "beta"),
    "weights that are computed": lambda w, x: w.node("LayerNormalization", x, w.node("Neg", x), "beta"),
    "the weight": lambda w, x: w.node("LayerNormalization", "gamma", x, "beta"),
    "root mean square": lambda w, x: w.node(
        "Mul", w.node("Div", x, w.node("Sqrt", w.node("Add", w.mean(w.node("Mul", x, x)), EPSILON))), "gamma"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused(name: str) -> None:
    w = Writer()
    assert find(w.model(OTHERS[name](w, "y"))).norm is None


@pytest.mark.parametrize("axes", [(0,), (-2,), (0, 1), (1, -1)])
@pytest.mark.parametrize("opset", [17, 18])
def test_means_over_other_axes_are_refused(opset: int, axes: tuple[int, ...]) -> None:
    for wrong in range(2):
        w = Writer(opset)
        d = w.node("Sub", "y", w.mean("y", axes if wrong == 0 else (-1,)))
        variance = w.mean(w.node("Mul", d, d), axes if wrong == 1 else (-1,))
        root = w.node("Sqrt", w.node("Add", variance, EPSILON))
        assert find(w.model(w.node("Mul", w.node("Div", d, root), "gamma"))).norm is None


@pytest.mark.parametrize("epsilon", [-1e-5, math.nan, math.inf])
def test_epsilons_that_are_none_are_refused(epsilon: float) -> None:
    w = Writer()
    assert find(w.model(w.node("LayerNormalization", "y", "gamma", "beta", epsilon=epsilon))).norm is None


def test_weights_that_callers_may_replace_are_refused() -> None:
    for form in FORMS:
        w = Writer()
        output = form(w, "y")
        w.inputs["gamma"] = (FLOAT, [N])
        assert find(w.model(output)).norm is None


def test_the_means_that_the_operator_also_gives() -> None:
    w = Writer()
    w.nodes.append(helper.make_node("LayerNormalization", ["y", "gamma", "beta"], ["z", "mean"], name="norm"))
    assert find(w.model("z")).norm is not None
    assert find(w.model("z", "mean")).norm is None


@pytest.mark.parametrize("form", [operator, torch_script])
def test_operators_of_other_domains_are_refused(form: Form) -> None:
    w = Writer()
    output = form(w, "y")
    model = ir.from_proto(w.model(output))
    for node in list(model.graph)[1:]:
        node.domain = "com.example"
        linear = next(linears_in(model))
        found = Epilogues().of(linear).norm
        # If only that Add has an unknown domain, the norm is found without bias.
        assert found is None or node.op_type == "Add", node.op_type
        assert found is None or found.bias is None
        node.domain = ""


OPS = ("Add", "Sub", "Mul", "Div", "Pow")


@examples(200)
@given(st.sampled_from(FORMULAS), st.data())
def test_whatever_is_found_in_a_damaged_form_is_what_it_computes(form: Form, data: st.DataObject) -> None:
    """One operand or operator is replaced at random. A match must still compute what the graph computes."""
    w = Writer()
    output = form(w, "y")
    index = data.draw(st.integers(1, len(w.nodes) - 1))
    node = w.nodes[index]
    if len(node.input) == 2 and data.draw(st.booleans()):
        node.op_type = data.draw(st.sampled_from(OPS))
    else:
        before = [name for earlier in w.nodes[:index] for name in earlier.output] + sorted(w.weights.keys() - {"W"})
        node.input[data.draw(st.integers(0, len(node.input) - 1))] = data.draw(st.sampled_from(before))
    model = w.model(output)
    found = find(model)
    if found.norm is None or found.output.name != output:
        return
    x = np.random.default_rng(3).standard_normal((6, K)).astype(np.float32)
    y = x @ w.weights["W"] + w.weights["b"]
    weight, bias = (
        np.zeros(N) if value is None or value.const_value is None else value.const_value.numpy()
        for value in (found.norm.weight, found.norm.bias)
    )
    if found.residual is not None:
        assert found.residual.const_value is not None
        y = y + found.residual.const_value.numpy()
    z = (normalized(y, found.norm.epsilon, bias=False) / GAMMA) * weight + bias
    np.testing.assert_allclose(run_unoptimized(model, {"x": x})[0], z, rtol=1e-4, atol=1e-4)


def optimized(w: Writer, output: str, rank: int = 2) -> OptimizationReport:
    """Optimize with VNNISpMM and no pruning, and check the answers with the library and without it."""
    model = w.model(output, rank=rank)
    report = optimize(model, recipe=NAMED["sparse-int8-4x1"], options={"sparsity": 0.0})
    assert report.model is not None
    onnx.checker.check_model(report.model)
    feeds = some_feeds(w)
    (expected,) = run(model, feeds)
    for library in (True, False):
        (found,) = run(report.model, feeds, library)
        assert found.shape == expected.shape and relative_error(expected, found) < LAYER_ERROR
    return report


def fused(report: OptimizationReport) -> list[list[str]]:
    return [layer.fused for layer in report.layers]


@pytest.mark.parametrize(
    ("form", "opset"), [(form, opset) for form in FORMS for opset in (13, 17, 21) if opset > 13 or form in FORMULAS]
)
def test_layer_residual_and_norm_become_one_node(form: Form, opset: int) -> None:
    w = Writer(opset)
    report = optimized(w, form(w, w.residual("y")))
    assert report.model is not None and op_types(report.model) == ["VNNISpMM"]
    assert fused(report) == [["residual", "layer norm"]]
    kept = {tensor.name for tensor in report.model.graph.initializer}
    assert kept.isdisjoint(set(w.weights) - {"b"})


def test_a_model_of_opset_11() -> None:
    w = Writer(11)
    assert op_types(optimized(w, torch_script(w, w.residual("y"))).model) == ["VNNISpMM"]


@pytest.mark.parametrize("shape", [(N,), (1, N), (1,), (), ("batch", 1), (3, "batch", N), (2, 1, 1)])
def test_residuals_of_any_shape(shape: tuple[int | str, ...]) -> None:
    w = Writer()
    w.inputs["r"] = (FLOAT, list(shape))
    output = torch_script(w, w.node("Add", "y", "r"))
    assert op_types(optimized(w, output, rank=max(2, len(shape))).model) == ["VNNISpMM"]


def test_layers_with_and_without() -> None:
    """A model has one ONNX function, so its layers without a norm get the inputs for it as well."""
    w = Writer()
    normed = operator(w, w.residual("y"))
    w.weights |= {"W2": random_weight(N, 8), "W3": random_weight(8, N, seed=5)}
    w.nodes.append(helper.make_node("MatMul", [normed, "W2"], ["inner"], name="plain"))
    w.nodes.append(helper.make_node("Relu", ["inner"], ["active"], name="relu"))
    w.nodes.append(helper.make_node("MatMul", ["active", "W3"], ["outer"], name="last"))
    output = operator_without_bias(w, w.node("Add", "outer", normed))
    report = optimized(w, output)
    assert op_types(report.model) == ["VNNISpMM"] * 3
    assert fused(report) == [["residual", "layer norm"], ["relu"], ["residual", "layer norm"]]


def test_a_gated_unit_with_a_norm() -> None:
    w = Writer()
    w.weights["V"] = random_weight(K, N, seed=9)
    w.nodes.append(helper.make_node("MatMul", ["x", "V"], ["up"], name="up"))
    output = operator(w, w.residual(w.node("Mul", w.node("Mul", "y", w.node("Sigmoid", "y")), "up")))
    report = optimized(w, output)
    assert op_types(report.model) == ["VNNISpMM"]
    assert fused(report)[0] == ["silu", "gated", "residual", "layer norm"]


def test_weights_that_are_no_initializers() -> None:
    w = Writer()
    w.nodes.append(helper.make_node("Constant", [], ["weight"], value=numpy_helper.from_array(GAMMA)))
    w.nodes.append(helper.make_node("Identity", ["beta"], ["bias"]))
    types = op_types(optimized(w, w.node("LayerNormalization", "y", "weight", "bias")).model)
    assert types[-1] == "VNNISpMM" and "LayerNormalization" not in types


def test_layers_in_branches() -> None:
    """The norm's weights are outside the branches, where the pass cannot see that they are constant."""
    w = Writer()
    branches = []
    for name in ("then", "else"):
        inner = Writer()
        result = operator(inner, "y") if name == "then" else torch_script(inner, "y")
        constants = [numpy_helper.from_array(a, k) for k, a in inner.weights.items() if k not in w.weights]
        shown = [helper.make_tensor_value_info(result, FLOAT, ["rows", N])]
        branches.append(helper.make_graph(inner.nodes, name, [], shown, constants))
    w.nodes = [helper.make_node("If", ["flag"], ["z"], then_branch=branches[0], else_branch=branches[1], name="if")]
    w.inputs["flag"] = (TensorProto.BOOL, [])
    proto = make_model(w.nodes, w.inputs, {"z": (FLOAT, ["rows", N])}, w.weights)
    report = optimize(proto, recipe=NAMED["sparse-int8-4x1"], options={"sparsity": 0.0})
    assert report.model is not None and "LayerNormalization" not in op_types(report.model)
    for flag in (True, False):
        feeds = {"x": some_feeds(Writer())["x"], "flag": np.array(flag)}
        for library in (True, False):
            assert relative_error(run(proto, feeds)[0], run(report.model, feeds, library)[0]) < LAYER_ERROR


def test_a_sum_that_is_seen_elsewhere_stays_unnormalized() -> None:
    """Models that normalize before each layer also read the sum, so the norm stays separate."""
    w = Writer()
    total = w.residual("y")
    w.weights["W2"] = random_weight(N, N, seed=5)
    w.nodes.append(helper.make_node("MatMul", [operator(w, total), "W2"], ["inner"], name="second"))
    report = optimized(w, w.node("Add", "inner", total))
    assert op_types(report.model) == ["VNNISpMM", "AddLayerNorm", "VNNISpMM"]


def test_a_layer_of_one_column_is_not_normalized() -> None:
    """A residual could broadcast a layer with one column to more columns."""
    w = Writer()
    w.weights |= {"W": random_weight(K, 1), "b": random_weight(1), "one": np.ones(1, np.float32)}
    w.inputs["r"] = (FLOAT, ["batch", 1])
    model = w.model(w.node("LayerNormalization", w.node("Add", "y", "r"), "one", "one"))
    assert find(model).norm is None and find(model).residual is not None


def test_without_fusion() -> None:
    w = Writer()
    model = w.model(operator(w, w.residual("y")))
    report = optimize(model, recipe=NAMED["sparse-int8-4x1"], options={"replace.fuse": False})
    assert op_types(report.model) == ["VNNISpMM", "AddLayerNorm"]
    recipe = NAMED["sparse-int8-4x1"].without_pass("fuse_norm")
    report = optimize(model, recipe=recipe, options={"replace.fuse": False})
    assert op_types(report.model) == ["VNNISpMM", "Add", "LayerNormalization"]


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_every_operator_takes_it(weights: str) -> None:
    """One model has a layer with a fused norm and a layer without one."""
    w = Writer()
    w.weights["W2"] = random_weight(N, N, seed=5)
    y = operator(w, w.residual("y"))
    w.nodes.append(helper.make_node("MatMul", [y, "W2"], ["z"], name="second"))
    model = w.model("z")
    report = optimize(model, recipe=Recipe.of(weights=weights, ignore=()), options={"may_grow": True})
    assert fused(report)[0] == ["residual", "layer norm"]
    assert set(op_types(report.model)) == {"W4A8MatMul" if weights == "int4" else "SparseAMXMatMul"}
    feeds = some_feeds(w)
    for library in (True, False):
        assert relative_error(run(model, feeds)[0], run(report.model, feeds, library)[0]) < 0.15


@pytest.mark.parametrize("recipe", ["sparse-int8-4x1", "sparse-int8-4x1-static"])
def test_bert(recipe: str) -> None:
    """BERT's second norm follows a node that contains both layers of the MLP."""
    model = ir.to_proto(tiny.tiny_bert(num_hidden_layers=3))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (2, 16))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    report = optimize(model, recipe=recipe, calibration=feeds, options={"sparsity": 0.0})
    parts = [part for layer in report.layers for part in layer.fused]
    assert parts.count("layer norm") == parts.count("residual") == 6
    assert report.model is not None
    assert [one for one in op_types(report.model) if "LayerNorm" in one] == ["AddLayerNorm"]  # of the embeddings
    (expected,) = run(model, feeds)
    for library in (True, False):
        assert relative_error(expected, run(report.model, feeds, library)[0]) < 0.05
