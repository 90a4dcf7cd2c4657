"""Comparison of pruned encoders: source files, and a whole run on a tiny model."""

import sys
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ortolan.benchmarks.encoder import FP32, INT8, Encoder
from ortolan.models import tiny
from tools.peers import sparse_encoders
from tools.peers.comparison import Job, compare
from tools.peers.environments import ASKED_FOR
from tools.peers.result import PeersResult

from ..api.word_tokenizer import write_tokenizer


@pytest.fixture
def encoder(tmp_path):
    ir.save(tiny.tiny_bert(hidden_size=64, intermediate_size=128, vocab_size=30001), tmp_path / "model.onnx")
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    return Encoder(tmp_path / "model.onnx", write_tokenizer(tmp_path / "tokenizer.json"), inputs)


def linear_weights(path) -> list[np.ndarray]:
    graph = onnx.load(path).graph
    tensors = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    return [tensors[node.input[1]] for node in graph.node if node.op_type == "MatMul" and node.input[1] in tensors]


def test_blocks_of_four_outputs_are_zero_in_a_plain_model(encoder, tmp_path):
    pruned = sparse_encoders.prune(encoder, 0.8, tmp_path / "pruned")
    weights = linear_weights(pruned.onnx)
    assert len(weights) == len(linear_weights(encoder.onnx))
    for weight in weights:
        blocks = (weight.reshape(weight.shape[0], -1, 4) == 0).all(axis=2)
        assert blocks.mean() == pytest.approx(0.8, abs=0.01) == pytest.approx((weight == 0).mean(), abs=0.01)
    assert not onnx.load(pruned.onnx).metadata_props
    # The remaining weights are unchanged.
    for weight, original in zip(weights, linear_weights(encoder.onnx), strict=True):
        np.testing.assert_array_equal(weight[weight != 0], original[weight != 0])


@pytest.mark.slow
def test_the_whole_of_it(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_encoders, "open_model", lambda name, folder: encoder)
    monkeypatch.setattr("tools.peers.configuration._WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(sparse_encoders, "compare", partial(compare, openings=1))
    model = "all-minilm-l6-v2, 80 %"
    # The other runtime is not installed, but its model files are written.
    pythons = dict.fromkeys(ASKED_FOR, sys.executable)
    job = Job((1,), 0.0, pythons, tmp_path / "job", lambda line: None, models=(model,), works=("1x16",))
    result = PeersResult("command", "2026-11-25")
    sparse_encoders.measure(job, result)
    assert list(result.groups()) == [("sparse encoders", model)]
    assert [row.name for row in result.rows] == [FP32, INT8, *(form.name for form in sparse_encoders.OURS)]
    for row in result.rows:
        assert row.quality["cosine"] > 0.9 and row.speed("1x16", 1).best > 0
    assert len(result.left_out) == len(sparse_encoders.DEEPSPARSE)
    assert all("No module named 'deepsparse'" in reason for reason in result.left_out)
