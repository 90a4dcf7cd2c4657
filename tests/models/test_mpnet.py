"""build_mpnet against an independent NumPy MPNet."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from scipy.special import erf

from ortolan.models import tiny
from ortolan.models.graph_builder import ModelBuildError
from ortolan.models.mpnet import PADDING, MpnetConfig, build_mpnet, mpnet_weight_shapes


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["last_hidden_state"], feeds)[0]


def random_feeds(config: MpnetConfig, batch: int, sequence: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Return sentences of different lengths, the first without padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, sequence + 1, batch)
    lengths[0] = sequence
    mask = np.arange(sequence) < lengths[:, None]
    ids = rng.integers(PADDING + 1, config.vocab_size, (batch, sequence))
    return {"input_ids": np.where(mask, ids, PADDING), "attention_mask": mask.astype(np.int64)}


def bucket(distance: int) -> int:
    """Return the bucket 0 … 31 of a relative position.

    Keys before the query use 16 buckets: one for each distance from 0 to 7, and 8 that start at distances 8 *
    sqrt(2)**i. Keys after the query use 16 buckets of the same sizes.
    """
    far = abs(distance)
    row = far if far < 8 else min(15, 8 + max(i for i in range(20) if far**2 >= 64 * 2**i))
    return row + 16 * (distance > 0)


def reference_mpnet(w: dict[str, np.ndarray], config: MpnetConfig, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return MPNet's outputs, computed in float64 per sentence without padding, one head at a time."""
    w = {name: array.astype(np.float64) for name, array in w.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.layer_norm_eps)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    sentences = []
    for row, mask in zip(feeds["input_ids"], feeds["attention_mask"], strict=True):
        ids = row[mask == 1]
        x = w["embeddings.word_embeddings.weight"][ids]
        x = norm(x + w["embeddings.position_embeddings.weight"][2 : 2 + len(ids)], "embeddings.LayerNorm")
        buckets = [[bucket(key - query) for key in range(len(ids))] for query in range(len(ids))]
        position_bias = w["encoder.relative_attention_bias.weight"][np.array(buckets)]
        for layer in range(config.num_hidden_layers):
            p = f"encoder.layer.{layer}"
            q, k, v = (dense(x, f"{p}.attention.attn.{name}") for name in "qkv")
            context = np.empty_like(x)
            for head in range(config.num_attention_heads):
                part = slice(head * config.head_dim, (head + 1) * config.head_dim)
                scores = q[:, part] @ k[:, part].T / np.sqrt(config.head_dim) + position_bias[:, :, head]
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                context[:, part] = weights / weights.sum(-1, keepdims=True) @ v[:, part]
            x = norm(x + dense(context, f"{p}.attention.attn.o"), f"{p}.attention.LayerNorm")
            inner = dense(x, f"{p}.intermediate.dense")
            inner = inner * 0.5 * (1 + erf(inner / np.sqrt(2)))
            x = norm(x + dense(inner, f"{p}.output.dense"), f"{p}.output.LayerNorm")
        sentences.append(x)
    return sentences


@pytest.mark.parametrize(
    "overrides",
    [{}, {"hidden_size": 40, "intermediate_size": 100}, {"hidden_size": 21, "num_attention_heads": 3}],
    ids=["round", "odd", "odd_head"],
)
@pytest.mark.parametrize(("batch", "sequence"), [(1, 1), (3, 7), (2, 64), (1, 200)])
def test_equals_numpy(overrides, batch, sequence):
    overrides = overrides | {"max_position_embeddings": sequence + 2}
    config = MpnetConfig(**{**vars(tiny.TINY_MPNET), **overrides})
    weights = tiny.random_weights(mpnet_weight_shapes(config), seed=5)
    # Scale the position biases so that a wrong bucket changes the output measurably.
    weights["encoder.relative_attention_bias.weight"] *= 3
    feeds = random_feeds(config, batch, sequence)
    found = run(build_mpnet(weights, config), feeds)
    assert found.dtype == np.float32
    expected = reference_mpnet(weights, config, feeds)
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one[: len(other)], other, atol=1e-4, err_msg=f"sentence {row}")


def test_passes_the_checker_and_names_nodes_like_exports():
    proto = ir.to_proto(tiny.tiny_mpnet())
    onnx.checker.check_model(proto, full_check=True)
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 17)]
    names = [node.name for node in proto.graph.node]
    assert len(names) == len(set(names))
    assert {"/encoder/layer.0/attention/attn/q/MatMul", "/encoder/layer.1/output/dense/Add"} <= set(names)
    # One Gather looks up the table for all layers.
    assert [name for name in names if "relative_attention_bias" in name] == ["/encoder/relative_attention_bias/Gather"]
    assert [value.name for value in proto.graph.input] == ["input_ids", "attention_mask"]


def test_padding_changes_nothing_wherever_it_is():
    config = tiny.TINY_MPNET
    feeds = random_feeds(config, 1, 6)
    model = tiny.tiny_mpnet()
    alone = run(model, feeds)
    for before, after in ((0, 5), (4, 1)):
        widths = ((0, 0), (before, after))
        padded = {
            "input_ids": np.pad(feeds["input_ids"], widths, constant_values=PADDING),
            "attention_mask": np.pad(feeds["attention_mask"], widths),
        }
        np.testing.assert_allclose(run(model, padded)[:, before : before + 6], alone, atol=1e-5)


def test_a_sentence_that_is_all_padding_gives_no_nan():
    feeds = random_feeds(tiny.TINY_MPNET, 2, 4)
    feeds["attention_mask"][1] = 0
    assert np.isfinite(run(tiny.tiny_mpnet(), feeds)).all()


def test_missing_weights_are_named():
    weights = tiny.random_weights(mpnet_weight_shapes(tiny.TINY_MPNET))
    del weights["encoder.relative_attention_bias.weight"]
    with pytest.raises(ModelBuildError, match=r"1 of \d+ weights.*'encoder\.relative_attention_bias\.weight'"):
        build_mpnet(weights, tiny.TINY_MPNET)


def test_config_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 384, "pad_token_id": 1, "model_type": "mpnet"}))
    config = MpnetConfig.from_json(path)
    assert (config.hidden_size, config.num_attention_heads, config.max_position_embeddings) == (384, 12, 514)
    for field, value in {"hidden_act": "relu", "pad_token_id": 0, "relative_attention_num_buckets": 64}.items():
        path.write_text(json.dumps({field: value}))
        with pytest.raises(ModelBuildError, match=f"{field} is {value!r}; only"):
            MpnetConfig.from_json(path)
    with pytest.raises(ModelBuildError, match="not a multiple"):
        MpnetConfig(hidden_size=50, num_attention_heads=12)
