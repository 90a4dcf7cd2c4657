"""Pass unpad for models whose vectors at masked positions are used, such as ColBERT's query expansion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ortolan
from ortolan import Recipe
from ortolan.models import tiny

from .padded_models import PAD, answers, both, changed, encoder_feeds, first_token, masked_mean, proto, reason
from .small_models import optimize, relative_error, run

INT8 = Recipe.of(weights="int8")
MASK_TOKEN = 4
# attention_mask: 1 for text. PADDING marks the padding; the positions in neither are expansion tokens.
EXPANDED = [[1] * 5 + [0] * 4, [1] * 9, [1, 1, 0, 0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0, 0]]
PADDING = [[0] * 7 + [1] * 2, [0] * 9, [0] * 6 + [1] * 3, [1, 1] + [0] * 7]


def expanded_feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    feeds = encoder_feeds(model, EXPANDED)
    feeds["input_ids"][(feeds["attention_mask"] == 0) & (np.array(PADDING) == 0)] = MASK_TOKEN
    return feeds


ENCODERS = {"bert": tiny.tiny_bert, "mpnet": tiny.tiny_mpnet, "modernbert": tiny.tiny_modernbert}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_hidden_tokens_are_answered(encoder: str) -> None:
    """Answers equal the original's at all positions except padding, where they are 0."""
    model = proto(ENCODERS[encoder]())
    padded, report = both(model, INT8)
    unpadded = changed(report)
    assert any(f"do not run on masked positions with token {PAD}" in note for note in report.notes)
    feeds, padding = expanded_feeds(model), np.array(PADDING) != 0
    (expected,), (found,) = answers(padded, feeds), answers(unpadded, feeds)
    (plain,) = run(unpadded, feeds)
    for y in (found, plain):
        assert not y[padding].any()
        assert relative_error(expected[~padding], y[~padding]) < 0.02
        hidden = ~padding & (feeds["attention_mask"] == 0)
        assert relative_error(expected[hidden], y[hidden]) < 0.03
    text = feeds["attention_mask"] != 0
    without = feeds | {"input_ids": np.where(text, feeds["input_ids"], PAD)}
    for row in (0, 1):  # the expansion tokens do not change the vectors of the text
        np.testing.assert_array_equal(answers(unpadded, without)[0][row][text[row]], found[row][text[row]])
    for row in range(len(text)):
        alone = {name: array[row : row + 1] for name, array in feeds.items()}
        np.testing.assert_array_equal(answers(unpadded, alone)[0][0], found[row])


@pytest.mark.parametrize("options", [{"drop_hidden": True}, {"drop_hidden": True, "pad_token_id": PAD}])
def test_all_hidden_tokens_are_padding_if_the_user_says_it(options: dict[str, Any]) -> None:
    model = proto(tiny.tiny_bert())
    unpadded = changed(both(model, INT8, options)[1])
    feeds = expanded_feeds(model)
    (y,) = answers(unpadded, feeds)
    assert not y[feeds["attention_mask"] == 0].any()


@pytest.mark.parametrize("pooled", [masked_mean, first_token])
def test_vectors_that_are_pooled_need_no_padding_token(pooled: Any) -> None:
    model = pooled(proto(tiny.tiny_bert()))
    recipe = INT8.without_pass("unpad")
    report = optimize(model, recipe=recipe.with_pass("unpad"))
    unpadded = changed(report)
    feeds = expanded_feeds(model)
    assert relative_error(run(model, feeds)[0], answers(unpadded, feeds)[0]) < 0.05


def files(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> Path:
    onnx.save(proto(tiny.tiny_bert()), str(folder / "model.onnx"))
    (folder / "config.json").write_text(json.dumps(config))
    tokens = {1: "[PAD]", 2: "<s>", MASK_TOKEN: "[MASK]"}
    added = {"added_tokens_decoder": {str(number): {"content": token} for number, token in tokens.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(added | tokenizer))
    return folder / "model.onnx"


def of_folder(path: Path) -> ortolan.OptimizationReport:
    options = {"verify.seconds": 0.0, "may_grow": True}
    return ortolan.optimize_onnx(path, path.with_name("fast.onnx"), recipe=INT8, options=options)


@pytest.mark.parametrize("padding", ["[PAD]", "[MASK]"])
def test_the_padding_token_of_the_models_folder(tmp_path: Path, padding: str) -> None:
    """PyLate pads with the mask token, which is never left out."""
    report = of_folder(files(tmp_path, {"pad_token_id": 1}, {"pad_token": padding, "mask_token": "[MASK]"}))
    assert any("masked positions with token 1; last_hidden_state is 0 there" in note for note in report.notes)


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        ({"pad_token": "<s>", "mask_token": "[MASK]"}, "disagree on the padding token: 1 in config.json, 2 in"),
        ({"pad_token": "[PAD]", "mask_token": "[PAD]"}, "token 1 is both the padding token and the mask token"),
    ],
)
def test_a_folder_that_does_not_tell_padding_from_text(tmp_path: Path, tokenizer: dict[str, str], why: str) -> None:
    report = of_folder(files(tmp_path, {"pad_token_id": 1}, tokenizer))
    (note,) = (note for note in report.notes if note.startswith("padding is not skipped: output last_hidden_state"))
    assert why in note and "unpad.pad_token_id" in note and "unpad.drop_hidden" in note
    model = onnx.load(str(tmp_path / "model.onnx"))
    feeds = expanded_feeds(model)
    (expected,), (y,) = run(model, feeds), run(str(tmp_path / "fast.onnx"), feeds, library=True)
    assert relative_error(expected, y) < 0.05


def test_a_model_in_memory_without_options() -> None:
    found = reason(optimize(proto(tiny.tiny_bert()), recipe=INT8))
    assert "the model was not read from a file" in found


def test_verification_compares_hidden_tokens() -> None:
    """Verification counts errors at masked positions that are not padding."""
    model = proto(tiny.tiny_bert())
    feeds = expanded_feeds(model)
    report = both(model, INT8, calibration=feeds)[1]
    unpadded = changed(report)
    padding = np.array(PADDING) != 0
    (expected,), (y,) = run(model, feeds), answers(unpadded, feeds)
    (error,) = report.output_error
    np.testing.assert_allclose(error.relative_l2, relative_error(expected[~padding], y[~padding]), rtol=1e-2)


def with_hidden_queries(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a mask [batch, 1, tokens, tokens] that gives masked queries no key at all."""
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Sub":
            seen = node.input[1]
            nodes.append(helper.make_node("Transpose", [seen], ["queries"], perm=[0, 1, 3, 2]))
            nodes.append(helper.make_node("Mul", [seen, "queries"], ["pairs"]))
            node.input[1] = "pairs"
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model)
    return model


def test_a_mask_that_hides_all_keys_from_hidden_queries() -> None:
    """Queries without keys attend to all keys equally, so their vectors depend on padding.

    The pass accepts this only if nothing reads these vectors.
    """
    model = with_hidden_queries(proto(tiny.tiny_bert()))
    report = both(model, INT8)[1]
    assert "hides all tokens from the queries of masked positions, which are read" in reason(report)
    feeds = expanded_feeds(model)
    assert report.model is not None
    assert relative_error(run(model, feeds)[0], answers(report.model, feeds)[0]) < 0.05
    changed(both(masked_mean(with_hidden_queries(proto(tiny.tiny_bert()))), INT8)[1])
