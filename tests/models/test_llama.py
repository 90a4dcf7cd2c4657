"""build_llama against an independent NumPy Llama, with and without cache; reading llama2.c checkpoints."""

import struct
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortolan.models import tiny
from ortolan.models.graph_builder import ModelBuildError, lazy_weight
from ortolan.models.llama import build_llama
from ortolan.models.llama2c import read_llama2c
from ortolan.models.llama_config import llama_weight_shapes

from .llama_reference import Decoder, reference_llama

VARIANTS = {
    "grouped": {},
    "multi_head": {"num_key_value_heads": 4},
    "multi_query": {"num_key_value_heads": 1},
    "interleaved": {"rope_style": "interleaved"},
    "untied": {"tie_word_embeddings": False},
    "odd": {"hidden_size": 40, "intermediate_size": 99, "num_attention_heads": 4, "num_key_value_heads": 2},
    "biased": {"qkv_bias": True},
    "biased_interleaved": {"qkv_bias": True, "qk_norm": True, "rope_style": "interleaved"},
    "qk_norm": {"qk_norm": True},
    "gelu": {"activation": "gelu_tanh", "embedding_scale": 48**0.5},
    "wide_heads": {"head_dim": 18, "rope_theta": 500000.0, "rms_norm_eps": 1e-3},
    "windows": {"windows": (3, 0), "local_rope_theta": 100.0, "rope_theta": 1e6},
    "windows_of_one_base": {"windows": (1, 4), "qkv_bias": True},
    "capped": {"attention_softcap": 1.5, "logit_softcap": 2.0, "attention_scale": 0.4},
    "sandwich": {"sandwich_norms": True, "qk_norm": True},
    "scaled": {"residual_scale": 0.3, "logit_scale": 0.25, "embedding_scale": 3.0, "attention_scale": 0.05},
    "no_rope": {"no_rope_layers": (1,), "rope_style": "interleaved"},
    "partial": {"head_dim": 16, "rotary_dim": 12, "rope_style": "partial", "rope_magnitude": 1.2},
    "partial_interleaved": {"head_dim": 16, "rotary_dim": 8, "rope_style": "interleaved", "qk_norm": True},
}


def random_ids(batch: int, sequence: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, tiny.TINY_LLAMA.vocab_size, (batch, sequence))


@pytest.mark.parametrize("attention", ["standard", "gqa"])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_equals_numpy(overrides, attention):
    config = replace(tiny.TINY_LLAMA, **overrides)
    if attention == "gqa":
        config = replace(config, head_dim=48 if "head_dim" in overrides else 16)
    weights = tiny.random_weights(llama_weight_shapes(config), seed=7)
    ids = random_ids(2, 9)
    found = Decoder(build_llama(weights, config, attention=attention), config, batch=2).step(ids)
    np.testing.assert_allclose(found, [reference_llama(weights, config, row) for row in ids], atol=1e-4)


def test_rope_factors():
    config = replace(tiny.TINY_LLAMA, head_dim=16, rope_factors=(1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0))
    weights = tiny.random_weights(llama_weight_shapes(config), seed=7)
    ids = random_ids(1, 9)
    for attention in ("standard", "gqa"):
        found = Decoder(build_llama(weights, config, attention=attention), config).step(ids)
        np.testing.assert_allclose(found[0], reference_llama(weights, config, ids[0]), atol=1e-4)
    with pytest.raises(ModelBuildError, match="rope_factors has 3 values, expected 8"):
        replace(config, rope_factors=(1.0, 2.0, 3.0))


@pytest.mark.parametrize("attention", ["standard", "gqa"])
def test_lazy_weights_are_read_when_the_model_is_written(attention):
    config = replace(tiny.TINY_LLAMA, head_dim=16, qkv_bias=True)
    arrays = tiny.random_weights(llama_weight_shapes(config))
    read = []

    def lazy(name):
        return lazy_weight(lambda: read.append(name) or arrays[name], arrays[name].shape)

    weights = {name: lazy(name) for name in arrays}
    model = build_llama(weights, config, attention=attention, one_table=True, separate_qkv=[1])
    assert read == []
    projections = [name for name in model.graph.initializers if name.endswith("_proj.weight_t")]
    assert ("model.layers.0.self_attn.qkv_proj.weight_t" in projections) == (attention == "gqa")
    assert "model.layers.1.self_attn.q_proj.weight_t" in projections
    # The head reuses the embedding, so there is no second copy.
    assert not any(name.startswith("lm_head") for name in model.graph.initializers)
    ids = random_ids(1, 5)
    found = Decoder(model, config).step(ids)
    assert set(read) == set(arrays)
    np.testing.assert_allclose(found[0], reference_llama(arrays, config, ids[0]), atol=1e-4)


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_the_cache_continues_the_prompt(overrides):
    config = replace(tiny.TINY_LLAMA, **overrides)
    model = tiny.tiny_llama(**overrides)
    ids = random_ids(2, 8)
    whole = Decoder(model, config, batch=2).step(ids)
    stepwise = Decoder(model, config, batch=2)
    pieces = [stepwise.step(ids[:, :3])] + [stepwise.step(ids[:, index : index + 1]) for index in range(3, 8)]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-4)


def test_left_padding_changes_nothing():
    config, model = tiny.TINY_LLAMA, tiny.tiny_llama()
    ids = random_ids(1, 5)
    padded = Decoder(model, config)
    logits = padded.step(
        np.pad(ids, ((0, 0), (3, 0))),
        mask=np.array([[0, 0, 0, 1, 1, 1, 1, 1]]),
        positions=np.array([[0, 0, 0, 0, 1, 2, 3, 4]]),
    )
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[:, 3:], Decoder(model, config).step(ids), atol=1e-4)


def test_group_query_attention_with_a_cache_and_rows_of_two_lengths():
    config = replace(tiny.TINY_LLAMA, head_dim=16)
    weights = tiny.random_weights(llama_weight_shapes(config), seed=2)
    model = build_llama(weights, config, attention="gqa")
    assert [node.op_type for node in model.graph].count("GroupQueryAttention") == config.num_hidden_layers
    ids = random_ids(2, 9)
    cached = Decoder(model, config, batch=2)
    first = cached.step(ids[:, :8])
    expected = [reference_llama(weights, config, row) for row in ids]
    np.testing.assert_allclose(np.concatenate([first, cached.step(ids[:, 8:])], axis=1), expected, atol=1e-4)
    # Padding is at the end.
    mask = np.ones_like(ids)
    mask[1, 5:] = 0
    found = Decoder(model, config, batch=2).step(ids, mask)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4)
    np.testing.assert_allclose(found[1, :5], expected[1][:5], atol=1e-4)


def test_passes_the_checker_and_names_values_like_optimum():
    proto = ir.to_proto(tiny.tiny_llama())
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version <= 10
    inputs = [value.name for value in proto.graph.input]
    assert inputs[:4] == ["input_ids", "attention_mask", "position_ids", "past_key_values.0.key"]
    assert [value.name for value in proto.graph.output][:3] == ["logits", "present.0.key", "present.0.value"]
    names = [node.name for node in proto.graph.node]
    assert len(names) == len(set(names))
    assert "/model/layers.1/mlp/down_proj/MatMul" in names


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 50}, "give head_dim"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rope_style": "quarter"}, "rope_style is 'quarter'"),
        ({"attention": "flash"}, "attention is 'flash'; expected one of standard, gqa"),
        ({"attention": "gqa"}, "head_dim is 12, expected a multiple of 16"),
    ],
)
def test_impossible_configurations_are_refused(overrides, message):
    with pytest.raises(ModelBuildError, match=message):
        tiny.tiny_llama(**overrides)


def write_llama2c(path, config, weights):
    positions = config.max_position_embeddings
    order = ["input_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo"), "post_attention_layernorm"]
    order += [f"mlp.{name}_proj" for name in ("gate", "down", "up")]
    arrays = [weights["model.embed_tokens.weight"]]
    for kind in order:
        arrays += [weights[f"model.layers.{layer}.{kind}.weight"] for layer in range(config.num_hidden_layers)]
    arrays += [weights["model.norm.weight"], np.zeros(positions * config.head_size, np.float32)]
    if not config.tie_word_embeddings:
        arrays.append(weights["lm_head.weight"])
    header = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads)
    vocab = config.vocab_size if config.tie_word_embeddings else -config.vocab_size
    header += (config.num_key_value_heads, vocab, positions)
    path.write_bytes(struct.pack("<7i", *header) + b"".join(array.tobytes() for array in arrays))


@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_checkpoint_round_trip(tmp_path, tied):
    config = replace(tiny.TINY_LLAMA, rope_style="interleaved", tie_word_embeddings=tied, max_position_embeddings=16)
    weights = tiny.random_weights(llama_weight_shapes(config))
    write_llama2c(tmp_path / "model.bin", config, weights)
    found_config, found = read_llama2c(tmp_path / "model.bin")
    assert found_config == config
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    build_llama(found, found_config)


def test_bad_llama2c_checkpoints_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    config = replace(tiny.TINY_LLAMA, rope_style="interleaved")
    write_llama2c(path, config, tiny.random_weights(llama_weight_shapes(config)))
    whole = path.read_bytes()
    for content, message in [
        (whole[:-4], "expected .* for its header"),
        (whole[:20], "has 20 bytes"),
        (b"ak42" + whole[4:], "expected a llama2.c checkpoint"),
        (struct.pack("<i", -1) + whole[4:], "expected a llama2.c checkpoint"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ModelBuildError, match=message):
            read_llama2c(path)
