"""Models that score spans of words for labels, as GLiNER exports them: synthetic inputs fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

import ortolan
from ortolan.graph_passes.measure.feeds import Sizes, synthetic_feeds
from ortolan.models import tiny

LABEL, WIDTH = 7, 3  # the token in front of a label, and the words of the longest span


def span_model() -> ir.Model:
    """Return an encoder whose output has a score for each span and label token, [batch, words, WIDTH, labels]."""
    model = tiny.tiny_bert()
    graph, tape = model.graph, ir.tape.Tape()
    (tokens,) = graph.outputs
    hidden = int(tokens.shape[2])
    ids, mask, _ = graph.inputs
    int64 = ir.DataType.INT64
    more = {
        "words_mask": ["batch", "sequence"],
        "text_lengths": ["batch", "value"],
        "span_idx": ["batch", "spans", "i"],
    }
    for name, shape in more.items():
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(int64), shape=ir.Shape(shape)))
    graph.inputs.append(
        ir.Value(name="span_mask", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(["batch", "spans"]))
    )
    words, lengths, spans, spans_mask = graph.inputs[3:]

    def op(name: str, *inputs: Any, **attributes: Any) -> ir.Value:
        return tape.op(name, [one if isinstance(one, ir.Value) else constant(one) for one in inputs], attributes)

    def constant(number: Any) -> ir.Value:
        return tape.op("Constant", [], {"value": ir.tensor(np.asarray(number))})

    def weight(name: str, *shape: int) -> ir.Value:
        drawn = np.random.default_rng(len(name)).normal(0, hidden**-0.5, shape).astype(np.float32)
        return tape.initializer(ir.tensor(drawn, name=name))

    def where(condition: ir.Value) -> ir.Value:
        return op("Transpose", op("NonZero", condition), perm=[1, 0])

    def size(value: ir.Value, axis: int) -> ir.Value:
        return op("Slice", op("Shape", value), [axis], [axis + 1])

    at_labels = where(op("And", op("Equal", ids, LABEL), op("Greater", mask, 0)))
    labels = op("MatMul", op("GatherND", tokens, at_labels), weight("label_projection", hidden, hidden))
    at_words = where(op("Greater", words, 0))
    number = op("Unsqueeze", op("Sub", op("GatherND", words, at_words), 1), [1])
    target = op("Concat", op("Slice", at_words, [0], [1], [1]), number, axis=1)
    count = op("Unsqueeze", op("ReduceMax", lengths, keepdims=0), [0])
    empty = op("ConstantOfShape", op("Concat", size(ids, 0), count, [hidden], axis=0))
    by_word = op("ScatterND", empty, target, op("GatherND", tokens, at_words))
    by_word = op("MatMul", by_word, weight("word_projection", hidden, hidden))
    inside = op("Mul", spans, op("Cast", op("Unsqueeze", spans_mask, [2]), to=int64))
    everything = op("Concat", size(inside, 0), size(inside, 1), [hidden], axis=0)
    ends = [
        op("GatherElements", by_word, op("Expand", op("Slice", inside, [end], [end + 1], [2]), everything), axis=1)
        for end in (0, 1)
    ]
    found = op("Relu", op("Concat", *ends, axis=2))
    found = op("MatMul", found, weight("out_projection", 2 * hidden, hidden))
    rows = op("Div", size(inside, 1), [WIDTH])
    found = op("Reshape", found, op("Concat", size(inside, 0), rows, [WIDTH], size(by_word, 2), axis=0))
    logits = op("MatMul", found, op("Transpose", labels, perm=[1, 0]))
    logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch", "words", WIDTH, "labels"])
    graph.extend(tape.nodes)
    for value in tape.initializers:
        graph.register_initializer(value)
    graph.outputs[:] = [logits]
    return model


def test_words_and_spans_and_labels_fit_each_other() -> None:
    feeds = synthetic_feeds(span_model(), Sizes(2, 8, 0))
    np.testing.assert_array_equal(feeds["words_mask"], [[0, 0, 0, 0, 1, 2, 3, 4]] * 2)
    np.testing.assert_array_equal(feeds["text_lengths"], [[4], [4]])
    assert (feeds["input_ids"][:, [0, 2]] == LABEL).all()
    spans, inside = feeds["span_idx"], feeds["span_mask"]
    assert spans.shape == (2, 4 * WIDTH, 2) and inside.dtype == bool
    np.testing.assert_array_equal(spans[0, :4], [[0, 0], [0, 1], [0, 2], [1, 1]])
    np.testing.assert_array_equal(inside[0, -4:], [False, True, False, False])
    assert spans.max() == 3 and not spans[~inside].any()


def test_all_layers_are_optimized_without_calibration(tmp_path: Path) -> None:
    ir.save(span_model(), tmp_path / "model.onnx")
    report = ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "fast.onnx", weights="int8")
    (kept,) = [layer.reason or "" for layer in report.layers if layer.new_op is None]
    assert "another product of activations" in kept  # of spans and labels
    (output,) = report.output_error
    assert 0 < output.relative_l2 < 0.1
