"""build_modernbert against an independent NumPy ModernBERT."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from scipy.special import erf

from ortolan.models import tiny
from ortolan.models.graph_builder import ModelBuildError
from ortolan.models.modernbert import ModernBertConfig, build_modernbert, modernbert_weight_shapes


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["last_hidden_state"], feeds)[0]


def random_feeds(config: ModernBertConfig, batch: int, sequence: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Return sentences of different lengths, the first without padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, sequence + 1, batch)
    lengths[0] = sequence
    mask = np.arange(sequence) < lengths[:, None]
    ids = rng.integers(1, config.vocab_size, (batch, sequence))
    return {"input_ids": np.where(mask, ids, 0), "attention_mask": mask.astype(np.int64)}


def turned(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotate x [tokens, head_dim] by position.

    Elements i and i + head_dim / 2 form a complex number, which is rotated by the angle token * theta ** (-2 i /
    head_dim).
    """
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    complex_numbers = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([complex_numbers.real, complex_numbers.imag], -1)


def reference(w: dict[str, np.ndarray], config: ModernBertConfig, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return ModernBERT's outputs, computed in float64 per sentence without padding, one head at a time."""
    w = {name: array.astype(np.float64) for name, array in w.items()}

    def norm(x, name):
        if f"{name}.weight" not in w:
            return x
        return (
            (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_eps) * w[f"{name}.weight"]
        )

    def attention(q, k, v, theta, reach):
        scores = turned(q, theta) @ turned(k, theta).T / np.sqrt(config.head_dim)
        places = np.arange(len(q))
        scores[abs(places[:, None] - places) > reach] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v

    sentences = []
    for row, mask in zip(feeds["input_ids"], feeds["attention_mask"], strict=True):
        x = norm(w["embeddings.tok_embeddings.weight"][row[mask == 1]], "embeddings.norm")
        for layer in range(config.num_hidden_layers):
            p = f"layers.{layer}"
            q, k, v = np.split(norm(x, f"{p}.attn_norm") @ w[f"{p}.attn.Wqkv.weight"].T, 3, axis=-1)
            sees_all = layer % config.global_attn_every_n_layers == 0
            theta = config.global_rope_theta if sees_all else config.local_rope_theta
            reach = np.inf if sees_all else config.local_attention // 2
            heads = [
                attention(*(part[:, head : head + config.head_dim] for part in (q, k, v)), theta, reach)
                for head in range(0, config.hidden_size, config.head_dim)
            ]
            x = x + np.concatenate(heads, -1) @ w[f"{p}.attn.Wo.weight"].T
            inner, gate = np.split(norm(x, f"{p}.mlp_norm") @ w[f"{p}.mlp.Wi.weight"].T, 2, axis=-1)
            x = x + (inner * 0.5 * (1 + erf(inner / np.sqrt(2))) * gate) @ w[f"{p}.mlp.Wo.weight"].T
        sentences.append(norm(x, "final_norm"))
    return sentences


@pytest.mark.parametrize(
    "overrides",
    [{}, {"hidden_size": 40, "intermediate_size": 33}, {"global_attn_every_n_layers": 1}, {"local_attention": 2}],
    ids=["round", "odd", "global", "narrow"],
)
@pytest.mark.parametrize(("batch", "sequence"), [(1, 1), (3, 7), (2, 64)])
def test_equals_numpy(overrides, batch, sequence):
    config = ModernBertConfig(**{**vars(tiny.TINY_MODERNBERT), **overrides})
    weights = tiny.random_weights(modernbert_weight_shapes(config), seed=5)
    feeds = random_feeds(config, batch, sequence)
    found = run(build_modernbert(weights, config), feeds)
    assert found.dtype == np.float32
    for row, (one, other) in enumerate(zip(found, reference(weights, config, feeds), strict=True)):
        np.testing.assert_allclose(one[: len(other)], other, atol=1e-4, err_msg=f"sentence {row}")


def test_passes_the_checker_and_names_nodes_like_exports():
    proto = ir.to_proto(tiny.tiny_modernbert())
    onnx.checker.check_model(proto, full_check=True)
    names = [node.name for node in proto.graph.node]
    assert len(names) == len(set(names))
    assert {"/layers.0/attn/Wqkv/MatMul", "/layers.1/mlp/Wo/MatMul"} <= set(names)
    assert [value.name for value in proto.graph.input] == ["input_ids", "attention_mask"]


def test_missing_weights_are_named():
    weights = tiny.random_weights(modernbert_weight_shapes(tiny.TINY_MODERNBERT))
    del weights["layers.1.attn_norm.weight"]
    with pytest.raises(ModelBuildError, match=r"1 of \d+ weights.*'layers\.1\.attn_norm\.weight'"):
        build_modernbert(weights, tiny.TINY_MODERNBERT)


def test_config_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 384, "norm_bias": False, "model_type": "modernbert"}))
    config = ModernBertConfig.from_json(path)
    assert (config.hidden_size, config.num_attention_heads, config.local_attention) == (384, 12, 128)
    for field, value in {"hidden_activation": "silu", "attention_bias": True, "norm_bias": True}.items():
        path.write_text(json.dumps({field: value}))
        with pytest.raises(ModelBuildError, match=f"{field} is {value!r}; only"):
            ModernBertConfig.from_json(path)
    with pytest.raises(ModelBuildError, match="not a multiple"):
        ModernBertConfig(hidden_size=50, num_attention_heads=12)
