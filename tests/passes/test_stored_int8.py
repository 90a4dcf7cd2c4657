"""Layers with stored int8 weights are replaced by VNNISpMM with the same integers and ranges."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import NothingToReplaceError, Recipe, inspect_onnx
from ortolan.graph_passes.find.linear import Linear, NotLinear, find_linears

from ..recipes.forms import NAMED
from .int8_layers import DYNAMIC, FIXED, ROUNDED, Int8Layer, adopt, optimize, outputs, packed_integers, sparse_integers
from .qlinear_chain import chain_of_qlinear
from .small_models import make_model, op_types, relative_error, run

FORMS = [*DYNAMIC, *FIXED, *ROUNDED]


# --- every form of a layer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize(("unsigned", "zero_point"), [(False, 0), (True, 128)])
@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_kept(form, unsigned, zero_point, per_column, bias):
    layer = Int8Layer(form, 32, 24, unsigned, zero_point, per_column, bias=bias and form != "qlinear")
    model, x = layer.model(), layer.inputs()
    report = optimize(model, calibration={"x": x})
    found, scales = packed_integers(report.model)
    np.testing.assert_array_equal(found, layer.q)
    np.testing.assert_array_equal(scales, layer.scales)
    (reported,) = report.layers
    assert (reported.name, reported.status, reported.weight_bits) == ("linear", "replaced", 8)
    assert any("keeps the model's stored 8-bit weights exactly" in note for note in report.notes)
    assert not {"W", "zeros", "both", "x_zero"} & {tensor.name for tensor in report.model.graph.initializer} or (
        form == "qdq_reshape"
    )
    (original,) = run(model, {"x": x})
    for answer in outputs(report.model, x):
        if layer.fixed:  # sums of powers of two are exact, only x and y are rounded
            np.testing.assert_array_equal(answer, layer.expected(x))
            np.testing.assert_array_equal(answer, original)
        else:
            exact = x @ layer.matrix + (layer.b if layer.bias else 0)
            # A scale per token is at least as accurate as one scale per tensor.
            assert relative_error(exact, answer) <= relative_error(exact, original) < 0.02


@pytest.mark.parametrize("form", [*FIXED, *ROUNDED])
def test_int8_activations(form):
    layer = Int8Layer(form, 32, 24, x_unsigned=False)
    model, x = layer.model(), layer.inputs()
    report = optimize(model)
    np.testing.assert_array_equal(packed_integers(report.model)[0], layer.q)
    for answer in outputs(report.model, x):
        np.testing.assert_array_equal(answer, layer.expected(x))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_of_the_model(form):
    layer = Int8Layer(form, bias=form not in ("qlinear", "qgemm", "qgemm_trans_b"))
    left = op_types(optimize(layer.model()).model)
    if form in ROUNDED:
        assert left == ["VNNISpMM", "QuantizeLinear", "DequantizeLinear"]
    elif form == "qdq_reshape":
        assert left == ["QuantizeLinear", "DequantizeLinear", "Reshape", "VNNISpMM"]
    else:
        assert left == ["VNNISpMM"]


@pytest.mark.parametrize("form", FORMS)
def test_zero_points_that_int8_holds(form):
    """reduce_range makes 7-bit integers, whose differences to the zero point fit into int8."""
    q = sparse_integers(32, 24) // 2
    layer = Int8Layer(form, unsigned=True, zero_point=70, q=q)
    report = optimize(layer.model())
    np.testing.assert_array_equal(packed_integers(report.model)[0], q)


@pytest.mark.parametrize("form", FORMS)
def test_zero_points_that_int8_does_not_hold(form):
    q = sparse_integers(32, 24).astype(np.int16)
    q[3, 8] = -130
    layer = Int8Layer(form, unsigned=True, zero_point=130, q=np.clip(q, -130, 125), per_column=False)
    model, x = layer.model(), layer.inputs()
    report = optimize(model)
    assert any("'linear' is stored in 8 bits, but in a format" in note for note in report.notes)
    found, scales = packed_integers(report.model)
    assert np.abs(found * scales - layer.matrix).max() <= scales.max() / 2 * 1.001
    assert relative_error(x @ layer.matrix, outputs(report.model, x)[0]) < 0.05


@pytest.mark.parametrize("form", FORMS)
def test_the_smallest_number(form):
    q = sparse_integers(32, 24)
    q[q < -100] = -128
    layer = Int8Layer(form, q=q)
    np.testing.assert_array_equal(packed_integers(optimize(layer.model()).model)[0], q)


# --- nodes before and after the layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*DYNAMIC, *FIXED])
def test_activation_and_residual_are_fused(form):
    layer = Int8Layer(form, q=sparse_integers(24, 24), bias=True)
    more = [helper.make_node("Relu", ["r"], ["a"]), helper.make_node("Add", ["a", "x"], ["y"])]
    model, x = layer.model(*more), layer.inputs()
    report = optimize(model)
    assert report.layers[0].fused == ["relu", "residual"]
    assert relative_error(run(model, {"x": x})[0], outputs(report.model, x)[0]) < (1e-6 if layer.fixed else 0.02)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "dynamic"])
def test_who_else_uses_the_rounded_input_keeps_it(form):
    layer = Int8Layer(form)
    model = layer.model()
    model.graph.output.append(helper.make_tensor_value_info("xq", TensorProto.UINT8, ["batch", 32]))
    x = layer.inputs()
    report = optimize(model)
    rounds = "DynamicQuantizeLinear" if form in DYNAMIC else "QuantizeLinear"
    assert op_types(report.model).count(rounds) == 1 + (form in ROUNDED)
    np.testing.assert_array_equal(run(model, {"x": x})[1], run(report.model, {"x": x}, library=True)[1])


def test_layers_that_share_their_input():
    layer = Int8Layer("chain")
    other = [onnx.NodeProto.FromString(node.SerializeToString()) for node in layer.nodes("z")[1:]]
    for node in other:
        node.name += "_2"
        shared = ("xq", "xz", "xs", "W", "zeros", "scales")
        node.input[:] = [name if name in shared else f"{name}_2" for name in node.input]
        node.output[:] = [name if name == "z" else f"{name}_2" for name in node.output]
    model = layer.model()
    model.graph.node.extend(other)
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", layer.n]))
    report = optimize(model)
    assert op_types(report.model) == ["VNNISpMM"] * 2
    assert len([tensor for tensor in report.model.graph.initializer if tensor.name.endswith("values")]) == 1
    x = layer.inputs()
    first, second = run(report.model, {"x": x}, library=True)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("form", ROUNDED)
def test_a_chain_of_8_bit_layers(form):
    layer, model = chain_of_qlinear(form)
    report = optimize(model)
    assert op_types(report.model).count("VNNISpMM") == 2
    x = layer.inputs()
    np.testing.assert_array_equal(outputs(report.model, x)[0], run(model, {"x": x})[0])
    left = optimize(model, options={"replace.exclude": ["second"], "prune.exclude": ["second"]})
    kind = "QLinearMatMul" if form == "qlinear" else "QGemm"
    assert op_types(left.model) == ["VNNISpMM", "QuantizeLinear", kind, "DequantizeLinear"]
    np.testing.assert_array_equal(outputs(left.model, x)[0], run(model, {"x": x})[0])


@pytest.mark.parametrize("form", FORMS)
def test_layers_in_branches(form):
    def branch(layer: Int8Layer) -> onnx.GraphProto:
        nodes = layer.nodes("product")
        used = {name for node in nodes for name in node.input}
        tensors = [numpy_helper.from_array(array, name) for name, array in layer.tensors.items() if name in used]
        result = [helper.make_tensor_value_info("product", TensorProto.FLOAT, ["batch", layer.n])]
        return helper.make_graph(nodes, "branch", [], result, tensors)

    layers = [Int8Layer(form, seed=seed) for seed in (1, 2)]
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch(layers[0]), else_branch=branch(layers[1]))
    model = make_model(
        [node],
        {"x": (TensorProto.FLOAT, ["batch", 32]), "flag": (TensorProto.BOOL, [])},
        {"y": (TensorProto.FLOAT, ["batch", 24])},
        domains={"com.microsoft": 1},
    )
    report = optimize(model)
    assert op_types(report.model).count("VNNISpMM") == 2
    x = layers[0].inputs()
    for flag, layer in zip((True, False), layers, strict=True):
        feeds = {"x": x, "flag": np.array(flag)}
        # ONNX Runtime's sums may saturate on this CPU.
        assert relative_error(layer.expected(x), run(report.model, feeds, library=True)[0]) < 0.02


# --- passes that change the weight ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_dense_numbers_are_pruned_and_not_rounded_again(form, bias):
    layer = Int8Layer(form, q=sparse_integers(32, 24, 0.0), bias=bias and form != "qlinear")
    report = optimize(layer.model(), options={"prune.sparsity": 0.75})
    found, scales = packed_integers(report.model)
    np.testing.assert_array_equal(scales, layer.scales)
    np.testing.assert_array_equal(found[found != 0], layer.q[found != 0])
    blocks = found.reshape(32, 6, 4).any(axis=2)
    assert np.count_nonzero(blocks) == 48
    sums = np.abs(layer.matrix).reshape(32, 6, 4).sum(axis=2)
    assert sums[blocks].min() >= sums[~blocks].max()
    assert any("the remaining weights are kept exactly" in note for note in report.notes)
    assert report.layers[0].weight_bits == 8 and report.layers[0].sparsity >= 0.75
    x = layer.inputs()
    pruned = dataclasses.replace(layer, q=found)
    for answer in outputs(report.model, x):
        if layer.fixed:
            np.testing.assert_array_equal(answer, pruned.expected(x))
        else:
            assert relative_error(x @ pruned.matrix + (layer.b if layer.bias else 0), answer) < 0.02


@pytest.mark.parametrize("form", ["chain", "qdq", "qlinear"])
def test_a_dry_run_tells_what_the_run_does(form):
    for share in (0.75, 0.0):
        layer = Int8Layer(form, q=sparse_integers(32, 24, share))
        planned, done = optimize(layer.model(), dry_run=True), optimize(layer.model())
        assert [one.weight_bits for one in planned.layers] == [one.weight_bits for one in done.layers]
        assert [one.status for one in planned.layers] == ["would replace"]
        assert [note for note in planned.notes if "stored" in note or "stores" in note]


def test_four_bits_round_once_more():
    report = ortolan.optimize_onnx(
        Int8Layer("dynamic", 128, 64).model(), recipe=NAMED["int4"], options={"verify.seconds": 0.0, "may_grow": True}
    )
    assert op_types(report.model) == ["W4A8MatMul"]
    assert any("stored in 8 bits, but in a format that no chosen operator supports" in note for note in report.notes)


def test_a_pruned_layer_that_stays_is_a_matmul():
    recipe = Recipe.from_dict({"name": "r", "pass": [{"name": "normalize"}, {"name": "prune", "sparsity": 0.25}]})
    for form in ("dynamic", "dynamic_to_float"):
        layer = Int8Layer(form, q=sparse_integers(32, 24, 0.0), bias=True)
        report = ortolan.optimize_onnx(layer.model(), recipe=recipe)
        assert op_types(report.model) == ["MatMul", "Add"] and report.model.graph.node[0].name == "linear"
        x = layer.inputs()
        assert relative_error(run(layer.model(), {"x": x})[0], run(report.model, {"x": x})[0]) < 0.2


# --- adopt ------------------------------------------------------------------------------------------------------------


def two_layers(form: str, first: np.ndarray, second: np.ndarray) -> onnx.ModelProto:
    layers = [Int8Layer(form, q=first), Int8Layer(form, q=second)]
    nodes, tensors = [], {}
    for number, layer in enumerate(layers):
        for node in layer.nodes("end"):
            node.name += f"_{number}"
            node.input[:] = [name and f"{number}_{name}" for name in node.input]
            node.output[:] = [f"{number}_{name}" for name in node.output]
            nodes.append(node)
        tensors |= {f"{number}_{name}": array for name, array in layer.tensors.items()}
    for node in nodes:
        names = {"": "", "0_x": "x", "1_x": "0_end", "1_end": "y"}
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    used = {name for node in nodes for name in node.input if name}
    return make_model(
        nodes,
        {"x": (TensorProto.FLOAT, ["batch", len(first)])},
        {"y": (TensorProto.FLOAT, ["batch", second.shape[1]])},
        {name: array for name, array in tensors.items() if name in used},
        domains={"com.microsoft": 1},
    )


KEPT = {
    "to_float": "MatMulIntegerToFloat",
    "sparse_ml": "MatMulIntegerToFloat",
    "qdq": "MatMul",
    "qlinear": "QLinearMatMul",
    "qgemm": "QGemm",
    "qgemm_trans_b": "QGemm",
}


@pytest.mark.parametrize("form", [*DYNAMIC, *KEPT])
def test_adopt_takes_sparse_layers_and_dense_ones_whose_ranges_are_not_fixed(form):
    model = two_layers(form, sparse_integers(64, 64), sparse_integers(64, 64, 0.3))
    report = adopt(model)
    first, second = report.layers
    kinds = op_types(report.model)
    assert (first.new_op, first.weight_bits, kinds.count("VNNISpMM")) == ("VNNISpMM", 8, 1)
    if form in KEPT:
        assert (second.status, second.reason) == (
            "kept",
            "its input has a fixed range, which SparseAMXMatMul does not support",
        )
        assert kinds.count(KEPT[form]) == 1
    else:
        assert (second.new_op, second.weight_bits) == ("SparseAMXMatMul", 8)
    x = Int8Layer("qdq", 64, 64).inputs()
    assert relative_error(run(model, {"x": x})[0], outputs(report.model, x)[0]) < 0.02


def test_adopt_counts_blocks():
    """75 % of the weights are zero, but only 32 % of the blocks of four: too few for VNNISpMM."""
    q = np.where(np.random.default_rng(0).random((64, 64)) < 0.75, 0, 77).astype(np.int8)
    (layer,) = adopt(Int8Layer("dynamic", q=q).model()).layers
    assert layer.new_op == "SparseAMXMatMul"


def test_adopt_takes_both_kinds_of_numbers():
    from .stored_layers import NBitsLayer

    layer, nbits = Int8Layer("dynamic", 32, 64), NBitsLayer(64, 32, 32)
    model = make_model(
        [*layer.nodes("h"), nbits.node(x="h", name="second", prefix="n_")],
        {"x": (TensorProto.FLOAT, ["batch", 32])},
        {"y": (TensorProto.FLOAT, ["batch", 32])},
        {name: layer.tensors[name] for name in ("W", "scales", "zeros")}
        | {f"n_{name}": array for name, array in nbits.tensors.items()},
        domains={"com.microsoft": 1},
    )
    report = adopt(model)
    assert op_types(report.model) == ["VNNISpMM", "W4A8MatMul"]
    assert [found.weight_bits for found in report.layers] == [8, 4]
    excluded = adopt(model, options={"replace.exclude": ["linear"]})
    assert op_types(excluded.model) == ["DynamicQuantizeMatMul", "W4A8MatMul"]


# --- malformed --------------------------------------------------------------------------------------------------------


def why_not(model: onnx.ModelProto) -> str:
    (found,) = find_linears(ir.from_proto(model))
    if isinstance(found, NotLinear):
        return found.reason
    assert isinstance(found, Linear) and isinstance(found.int8, str), found
    return found.int8


def check_refused(model: onnx.ModelProto, text: str) -> None:
    """Check that no pass raises an error, and that every report has the reason."""
    assert text in why_not(model)
    (layer,) = inspect_onnx(model).linears
    assert text in (layer.reason or why_not(model))
    recipe = Recipe.from_dict({"name": "r", "pass": [{"name": "normalize"}, {"name": "replace", "op": "VNNISpMM"}]})
    with pytest.raises(NothingToReplaceError) as caught:
        ortolan.optimize_onnx(model, recipe=recipe)
    assert text in str(caught.value)


@pytest.mark.parametrize("bad", [0.0, -0.5, np.nan, np.inf, 1e-42])
@pytest.mark.parametrize("form", FORMS)
def test_scales_that_are_no_numbers_above_zero(form, bad):
    layer = Int8Layer(form)
    name = "both" if form == "sparse_ml" else "scales"
    changed = layer.tensors[name].copy()
    changed[3] = bad
    check_refused(dataclasses.replace(layer, changes={name: changed}).model(), "has a scale of")


@pytest.mark.parametrize("bad", [0.0, -0.5, np.nan, np.inf])
@pytest.mark.parametrize(
    ("form", "name"), [("to_float", "x_scale"), *((form, name) for form in ROUNDED for name in ("x_scale", "y_scale"))]
)
def test_ranges_that_are_none(form, bad, name):
    what = "input" if name == "x_scale" else "output"
    model = Int8Layer(form, changes={name: np.array(bad, np.float32)}).model()
    check_refused(model, f"its {what} has no constant positive scale")


def test_an_input_without_a_usable_range_is_rounded_row_by_row():
    layer = Int8Layer(
        "qdq_gemm", changes={"x_scale": np.full(32, 2**-5, np.float32), "x_zero": np.full(32, 111, np.uint8)}
    )
    model, x = layer.model(), layer.inputs()
    (found,) = find_linears(ir.from_proto(model))
    assert found.x_range is None and found.int8 is not None
    report = optimize(model)
    assert op_types(report.model) == ["QuantizeLinear", "DequantizeLinear", "VNNISpMM"]
    assert relative_error(run(model, {"x": x})[0], outputs(report.model, x)[0]) < 0.02


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_another_shape(form):
    layer = Int8Layer(form)
    for name, array, text in [
        ("zeros", np.zeros(23, np.int8), "zero points 'zeros' have shape [23]"),
        ("scales", np.ones(23, np.float32), "[23]"),
    ]:
        if form.startswith("qdq"):  # the shape inference of onnx refuses these models
            model = dataclasses.replace(layer, changes={name: array}).model()
            assert text in why_not(model)
        elif not (form == "sparse_ml" and name == "scales"):
            model = dataclasses.replace(layer, changes={name: array}).model()
            if form.startswith("chain") and name == "scales":
                text = "'scales' are not a FLOAT constant with 1 or 24 elements"
            check_refused(model, text)


def constants_of(form: str) -> list[tuple[str, str]]:
    names = {tensor.name for tensor in Int8Layer(form).model().graph.initializer}
    return [(form, name) for name in sorted(names & {"W", "scales", "zeros", "x_scale", "x_zero", "both"})]


@pytest.mark.parametrize(("form", "name"), [one for form in FORMS for one in constants_of(form)])
def test_tensors_at_run_time(form, name):
    model = Int8Layer(form).model()
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    model.graph.initializer.remove(tensor)
    model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    found = find_linears(ir.from_proto(model))
    if form.startswith("qdq") and name.startswith("x_"):  # without a constant range, the layer itself is still found
        assert isinstance(found[0], Linear) and found[0].x_range is None
    else:
        assert not any(isinstance(one, Linear) for one in found)
        if name == "W":  # a MatMul of two activations need not be listed
            assert all("constant" in one.reason or "run time" in one.reason for one in found)
        else:
            assert len(found) == 1 and ("constant" in found[0].reason or "run time" in found[0].reason)


def node_of(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    (node,) = [node for node in model.graph.node if node.name == name]
    return node


def broken(form: str, name: str, change) -> onnx.ModelProto:
    model = Int8Layer(form).model()
    change(node_of(model, name))
    return model


def inputs(**names):
    def change(node: onnx.NodeProto) -> None:
        for key, name in names.items():
            node.input[int(key[1:])] = name

    return change


def retype(op_type):
    def change(node: onnx.NodeProto) -> None:
        node.op_type = op_type
        del node.attribute[:]
        del node.input[1:]

    return change


def attribute(name, value):
    def change(node: onnx.NodeProto) -> None:
        kept = [one for one in node.attribute if one.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


BROKEN = {
    "no cast": ("chain", "cast", retype("Identity"), "its sums go into Identity 'cast', expected a Cast"),
    "cast to half": ("chain", "cast", attribute("to", TensorProto.FLOAT16), "expected a Cast to float32"),
    "no mul": ("chain", "output_mul", retype("Relu"), "Relu 'output_mul' follows, expected a Mul by its scales"),
    "other zero": ("chain", "linear", inputs(_2="x_zero"), "a_zero_point is not an output of its Dynamic"),
    "no zero": ("chain", "linear", inputs(_2=""), "a_zero_point is not an output of its Dynamic"),
    "no scale": ("chain", "scales_mul", inputs(_0="x_scale"), "its sums 'y' have other consumers"),
    "twice": ("chain", "scales_mul", inputs(_1="xs"), "are not a FLOAT constant with 1 or 24 elements"),
    "weight first": ("chain", "linear", inputs(_0="W"), "is the first input"),
    "to float, other scale": (
        "dynamic_to_float",
        "linear",
        inputs(_2="x_scale"),
        "a_scale is not an output of its Dynamic",
    ),
    "to float, other zero": (
        "dynamic_to_float",
        "linear",
        inputs(_4="zeros"),
        "a_zero_point is not an output of its Dynamic",
    ),
    "other fixed zero": (
        "sparse_ml",
        "linear",
        inputs(_2="other"),
        "a_zero_point differs from the zero point of its Quant",
    ),
    "no fixed zero": ("sparse_ml", "linear", inputs(_2=""), "a_zero_point differs from the zero point of its Quant"),
    "transA": ("qgemm", "linear", attribute("transA", 1), "transA is 1, expected 0"),
    "three factors": (
        "chain",
        "output_mul",
        lambda node: node.input.append("x"),
        "'output_mul' has 3 inputs, expected 2",
    ),
    "alpha is a number": ("qgemm", "linear", attribute("alpha", 2), "'alpha' is not a float"),
    "alpha": ("qgemm", "linear", attribute("alpha", 0.5), "alpha is 0.5, expected 1"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_malformed_patterns(kind):
    form, name, change, text = BROKEN[kind]
    model = broken(form, name, change)
    extra = {"x_zero": np.array(3, np.uint8), "x_scale": np.array(1, np.float32), "other": np.array(3, np.uint8)}
    present = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, key) for key, array in extra.items() if key not in present
    )
    assert text in why_not(model)


@pytest.mark.parametrize("value", ["Wd", "xd"])
def test_values_that_are_made_of_themselves(value):
    model = Int8Layer("qdq").model()
    for node in model.graph.node:
        node.input[:] = ["loop" if name == value else name for name in node.input]
    model.graph.node.append(helper.make_node("Identity", ["loop_2"], ["loop"]))
    model.graph.node.append(helper.make_node("Identity", ["loop"], ["loop_2"]))
    with pytest.raises(ortolan.OrtolanError):
        optimize(model)


def test_sums_that_are_used_elsewhere():
    for form, value in (("chain", "sums"), ("chain", "floats"), ("sparse_ml", "sums")):
        model = Int8Layer(form).model()
        kind = TensorProto.INT32 if value == "sums" else TensorProto.FLOAT
        model.graph.output.append(helper.make_tensor_value_info(value, kind, ["batch", 24]))
        check_refused(model, f"its sums {value!r} have other consumers")


def test_empty_and_flat_weights():
    check_refused(
        Int8Layer("dynamic", changes={"W": np.zeros((32, 0), np.int8)}).model(), "weight 'W' is empty: [32, 0]"
    )
    model = Int8Layer("dynamic", changes={"W": np.zeros((2, 32, 24), np.int8)}).model()
    check_refused(model, "its weight 'W' is 3-D, expected 2-D")


def test_blocks_of_inputs():
    scales = np.full((2, 24), [[1.0], [2.0]], np.float32)
    model = Int8Layer("qdq", changes={"scales": scales, "zeros": np.zeros((2, 24), np.int8)})
    proto = model.model(opset=21, ir_version=10)
    attribute("block_size", 16)(node_of(proto, "weight"))
    attribute("axis", 0)(node_of(proto, "weight"))
    assert "per block of 16 inputs, expected one per output" in why_not(proto)


def test_scales_for_each_input():
    layer = Int8Layer("qdq", q=sparse_integers(24, 24))
    model = layer.model()
    attribute("axis", 0)(node_of(model, "weight"))
    assert "per input, expected one per output" in why_not(model)
