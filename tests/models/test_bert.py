"""build_bert against an independent NumPy BERT."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from scipy.special import erf

from ortolan.models import tiny
from ortolan.models.bert import (
    BertConfig,
    bert_weight_shapes,
    build_bert,
    build_bert_masked_lm,
    masked_lm_weight_shapes,
)
from ortolan.models.graph_builder import ModelBuildError


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def random_feeds(config: BertConfig, batch: int, sequence: int, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, sequence + 1, batch)
    lengths[0] = sequence
    return {
        "input_ids": rng.integers(0, config.vocab_size, (batch, sequence)),
        "attention_mask": (np.arange(sequence) < lengths[:, None]).astype(np.int64),
        "token_type_ids": rng.integers(0, config.type_vocab_size, (batch, sequence)),
    }


def reference_bert(
    w: dict[str, np.ndarray], config: BertConfig, feeds: dict[str, np.ndarray], has_head: bool = False
) -> np.ndarray:
    """Return BERT's outputs, computed in float64 one sentence and one head at a time."""
    w = {name: array.astype(np.float64) for name, array in w.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.layer_norm_eps)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    sentences = []
    for ids, mask, types in zip(*feeds.values(), strict=True):
        x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][types]
        x = norm(x + w["embeddings.position_embeddings.weight"][: len(ids)], "embeddings.LayerNorm")
        for layer in range(config.num_hidden_layers):
            p = f"encoder.layer.{layer}"
            q, k, v = (dense(x, f"{p}.attention.self.{name}") for name in ("query", "key", "value"))
            context = np.empty_like(x)
            for head in range(config.num_attention_heads):
                part = slice(head * config.head_dim, (head + 1) * config.head_dim)
                scores = q[:, part] @ k[:, part].T / np.sqrt(config.head_dim)
                scores[:, mask == 0] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                context[:, part] = weights / weights.sum(-1, keepdims=True) @ v[:, part]
            x = norm(x + dense(context, f"{p}.attention.output.dense"), f"{p}.attention.output.LayerNorm")
            inner = dense(x, f"{p}.intermediate.dense")
            inner = inner * 0.5 * (1 + erf(inner / np.sqrt(2)))
            x = norm(x + dense(inner, f"{p}.output.dense"), f"{p}.output.LayerNorm")
        if has_head:
            x = dense(x, "cls.predictions.transform.dense")
            x = norm(x * 0.5 * (1 + erf(x / np.sqrt(2))), "cls.predictions.transform.LayerNorm")
            x = x @ w["embeddings.word_embeddings.weight"].T + w["cls.predictions.bias"]
        sentences.append(x)
    return np.stack(sentences)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"hidden_size": 40, "intermediate_size": 100}, {"hidden_size": 21, "num_attention_heads": 3}],
    ids=["round", "odd", "odd_head"],
)
@pytest.mark.parametrize(("batch", "sequence"), [(1, 1), (3, 7), (2, 64)])
def test_equals_numpy(overrides, batch, sequence):
    config = BertConfig(**{**vars(tiny.TINY_BERT), **overrides})
    weights = tiny.random_weights(bert_weight_shapes(config), seed=5)
    feeds = random_feeds(config, batch, sequence)
    found = run(tiny.tiny_bert(seed=5, **overrides), feeds)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference_bert(weights, config, feeds), atol=1e-4)


def test_a_masked_language_model_equals_numpy():
    config = tiny.TINY_BERT
    weights = tiny.random_weights(masked_lm_weight_shapes(config), seed=5)
    feeds = random_feeds(config, 3, 7)
    expected = reference_bert({name.removeprefix("bert."): one for name, one in weights.items()}, config, feeds, True)
    model = build_bert_masked_lm(weights, config)
    assert [(one.name, one.shape[2]) for one in model.graph.outputs] == [("logits", config.vocab_size)]
    np.testing.assert_allclose(run(model, feeds), expected, atol=1e-4)


def test_passes_the_checker_and_names_nodes_like_exports():
    proto = ir.to_proto(tiny.tiny_bert())
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version <= 10
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 17)]
    names = [node.name for node in proto.graph.node]
    assert len(names) == len(set(names))
    assert {"/encoder/layer.0/attention/self/query/MatMul", "/encoder/layer.1/output/dense/Add"} <= set(names)
    assert "encoder.layer.0.attention.self.query.bias" in {tensor.name for tensor in proto.graph.initializer}
    shapes = {value.name: value.type.tensor_type.shape for value in proto.graph.input}
    assert [dim.dim_param for dim in shapes["input_ids"].dim] == ["batch", "sequence"]


def test_padding_changes_nothing():
    config = tiny.TINY_BERT
    feeds = random_feeds(config, 1, 6)
    padded = {name: np.pad(array, ((0, 0), (0, 5))) for name, array in feeds.items()}
    model = tiny.tiny_bert()
    np.testing.assert_allclose(run(model, padded)[:, :6], run(model, feeds), atol=1e-5)


def test_a_sentence_that_is_all_padding_gives_no_nan():
    feeds = random_feeds(tiny.TINY_BERT, 2, 4)
    feeds["attention_mask"][1] = 0
    assert np.isfinite(run(tiny.tiny_bert(), feeds)).all()


def test_ignores_weights_it_does_not_use():
    config = tiny.TINY_BERT
    weights = tiny.random_weights(bert_weight_shapes(config))
    extra = {"embeddings.position_ids": np.zeros((1, 64), np.int64), "pooler.dense.bias": np.zeros(48, np.float32)}
    build_bert(weights | extra, config)


def test_missing_or_misshapen_weights_are_named():
    config = tiny.TINY_BERT
    weights = tiny.random_weights(bert_weight_shapes(config))
    with pytest.raises(ModelBuildError, match=r"'bert.embeddings|found names like bert\.embeddings"):
        build_bert({f"bert.{name}": array for name, array in weights.items()}, config)
    weights["encoder.layer.1.output.dense.weight"] = weights["encoder.layer.1.output.dense.weight"].T
    with pytest.raises(
        ModelBuildError, match=r"encoder\.layer\.1\.output\.dense\.weight.*\(96, 48\), expected \(48, 96\)"
    ):
        build_bert(weights, config)


def test_config_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"hidden_size": 384, "num_hidden_layers": 6, "hidden_act": "gelu", "model_type": "bert"})
    )
    config = BertConfig.from_json(path)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (384, 6, 12)
    path.write_text(json.dumps({"hidden_act": "relu"}))
    with pytest.raises(ModelBuildError, match="hidden_act is 'relu'"):
        BertConfig.from_json(path)
    with pytest.raises(ModelBuildError, match="not a multiple"):
        BertConfig(hidden_size=50, num_attention_heads=12)
