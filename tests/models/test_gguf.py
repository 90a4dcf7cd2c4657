"""Decoders read from GGUF files that the package `gguf` wrote, and from damaged copies of these files."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.errors import OrtolanError
from ortolan.models.gguf import read_gguf, read_gguf_tokenizer, read_model
from ortolan.models.graph_builder import ModelBuildError
from ortolan.models.llama import build_llama

from ..sampling import examples
from .gguf_file import CONFIG, CONFIGS, FACTORS, METADATA, gguf, write
from .llama_reference import Decoder, reference_llama

IDS = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (1, 9))


@pytest.mark.parametrize("name", CONFIGS)
def test_architectures(tmp_path, name):
    config, architecture = CONFIGS[name], name.split(",")[0]
    path, metadata = tmp_path / "model.gguf", METADATA.get(name)
    weights = write(path, config, architecture=architecture, kinds=["F32"], metadata=metadata)
    model = read_model(tmp_path / "model.gguf")
    assert (model.config, model.architecture) == (config, architecture)
    assert set(model.weights) == set(weights)
    for key, array in weights.items():
        np.testing.assert_array_equal(model.weights[key].floats(), array, err_msg=key)
    # Reordering the rotary rows does not change the model.
    halves = model.with_halves()
    assert halves.config.rope_style == "half"
    for found in (model, halves):
        floats = {key: weight.floats() for key, weight in found.weights.items()}
        logits = Decoder(build_llama(floats, found.config, attention="gqa"), found.config).step(IDS)
        np.testing.assert_allclose(logits[0], reference_llama(weights, config, IDS[0]), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_quantized_weights(tmp_path, tied):
    config = replace(CONFIG, tie_word_embeddings=tied)
    weights = write(tmp_path / "model.gguf", config)
    found_config, found = read_gguf(tmp_path / "model.gguf")
    assert found_config == config
    assert set(found) == set(weights) and len(found) == len(weights)
    for name, array in weights.items():
        if array.ndim == 1 or name in ("model.embed_tokens.weight", "lm_head.weight"):
            np.testing.assert_array_equal(found[name], array, err_msg=name)
            continue
        # Q4_1 has 16 levels for each block of 32 along a row, and stores minimum and step in float16.
        blocks = array.reshape(-1, 32)
        step = np.ptp(blocks, axis=1, keepdims=True) / 15
        error = np.abs(found[name].reshape(-1, 32) - blocks)
        assert found[name].shape == array.shape and found[name].dtype == np.float32
        assert (error <= 0.52 * step + 2e-3 * np.abs(blocks).max()).all(), name
    build_llama(found, found_config)


@pytest.mark.parametrize(("window", "found"), [(512, (512, 512)), (2048, None), (0, None)])
def test_windows_shorter_than_the_context(tmp_path, window, found):
    write(tmp_path / "model.gguf", metadata={"llama.attention.sliding_window": window})
    assert read_model(tmp_path / "model.gguf").config.windows == found


def test_a_long_window_does_not_change_the_rotary_embedding(tmp_path):
    config = replace(CONFIGS["gemma3"], windows=(2048,) * 5 + (0, 2048))
    write(tmp_path / "model.gguf", config, architecture="gemma3", metadata=METADATA["gemma3"])
    found = read_model(tmp_path / "model.gguf").config
    assert [found.is_local(layer) for layer in range(7)] == [True] * 5 + [False, True]


def test_gemma2_caps_scores_and_logits_by_default(tmp_path):
    write(tmp_path / "model.gguf", CONFIGS["gemma2"], architecture="gemma2")
    config = read_model(tmp_path / "model.gguf").config
    assert (config.attention_softcap, config.logit_softcap) == (50, 30)


def test_granite_without_rotary_embedding(tmp_path):
    metadata = {**METADATA["granite"], "granite.rope.scaling.finetuned": False}
    write(tmp_path / "model.gguf", CONFIGS["granite"], architecture="granite", metadata=metadata)
    assert read_model(tmp_path / "model.gguf").config.no_rope_layers == (0, 1)


@pytest.mark.parametrize(("layers", "scale"), [(1, None), (62, 0.25)])
def test_gemma3_of_27b_scales_attention_by_its_width(tmp_path, layers, scale):
    config = replace(CONFIGS["gemma3"], num_hidden_layers=layers, windows=None, intermediate_size=32)
    write(tmp_path / "model.gguf", config, architecture="gemma3")
    assert read_model(tmp_path / "model.gguf").config.attention_scale == scale


def test_factors_of_long_texts_end_the_context(tmp_path):
    name = "phi3, short factors"
    write(tmp_path / "model.gguf", CONFIGS[name], architecture="phi3", metadata=METADATA[name])
    (note,) = read_model(tmp_path / "model.gguf").notes
    assert note.startswith("the context is 512 tokens, not 2048: longer texts have other rotary factors")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, r"llama.rope.scaling.type is 'longrope', expected none, linear or"),
        ({"llama.rope.scaling.type": "yarn"}, "has no metadata 'llama.rope.scaling.factor'"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 0.5,
                "llama.rope.scaling.original_context_length": 64,
            },
            "llama.rope.scaling.factor is 0.5, expected at least 1 for YaRN",
        ),
        ({"llama.expert_count": 8}, "has no metadata 'llama.expert_used_count'"),
        ({"llama.logit_scale": 8.0}, "llama.logit_scale = 8.0, which is not supported for architecture 'llama'"),
        (
            {"llama.attention.sliding_window": 8, "llama.attention.sliding_window_pattern": [True]},
            "is an array, expected",
        ),
        ({"llama.attention.value_length": 8}, "value_length is 8, expected 16"),
        ({"llama.rope.dimension_count": 18}, "dimension_count is 18, expected an even number up to 16"),
        ({"llama.embedding_length": "wide"}, "'llama.embedding_length' is 'wide', expected an integer"),
        ({"llama.block_count": 3}, r"lacks 9 of the \d+ tensors .*, such as 'blk\.2\.attn_norm\.weight'"),
        ({"llama.embedding_length": 32}, r"tensor 'token_embd\.weight' has shape \[\d+, 64\], expected \[\d+, 32\]"),
        ({"llama.pooling_type": 3}, r"embedding model \(llama.pooling_type is set\), but only decoders"),
    ],
)
def test_models_that_cannot_be_built(tmp_path, metadata, message):
    path = tmp_path / "model.gguf"
    write(path, metadata=metadata)
    with pytest.raises(ModelBuildError, match=message):
        model = read_model(path)
        build_llama({key: weight.floats() for key, weight in model.weights.items()}, model.config)


def test_yarn_needs_a_base_above_1(tmp_path):
    config = replace(CONFIGS["qwen2, yarn"], rope_theta=1.0)
    write(tmp_path / "model.gguf", config, architecture="qwen2", metadata=METADATA["qwen2, yarn"])
    with pytest.raises(ModelBuildError, match=r"qwen2.rope.freq_base is 1.0, expected more than 1 for YaRN"):
        read_model(tmp_path / "model.gguf")


def test_tensors_that_nobody_reads(tmp_path):
    write(tmp_path / "model.gguf", tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelBuildError, match=r"holds 1 tensors that are not supported .*, such as 'blk.0.attn_sinks"):
        read_model(tmp_path / "model.gguf")
    write(tmp_path / "model.gguf", tensors={"rope_freqs.weight": np.array([*FACTORS[:7], 0], np.float32)})
    with pytest.raises(ModelBuildError, match="values that are not positive"):
        read_model(tmp_path / "model.gguf")


def test_other_files_are_refused(tmp_path, monkeypatch):
    gpt = gguf.GGUFWriter(tmp_path / "gpt.gguf", "gpt2")
    gpt.write_header_to_file()
    gpt.write_kv_data_to_file()
    gpt.write_tensors_to_file()
    gpt.close()
    with pytest.raises(ModelBuildError, match="architecture 'gpt2', expected one of 'llama', 'qwen2'"):
        read_gguf(tmp_path / "gpt.gguf")
    bert = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    bert.write_header_to_file()
    bert.write_kv_data_to_file()
    bert.write_tensors_to_file()
    bert.close()
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: pytest.fail("the file was read"))
    message = (
        "embedding model .architecture 'bert'., but only decoders can be imported; export the original .* optimum-cli"
    )
    with pytest.raises(ModelBuildError, match=message):
        read_gguf(tmp_path / "bert.gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, but long enough for a header of one")
    with pytest.raises(
        ModelBuildError,
        match="is not a GGUF file: it does not begin with 'GGUF'; for ONNX models: ortolan optimize",
    ):
        read_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(ModelBuildError, match="cannot be read as a GGUF file"):
        read_gguf(path)
    with pytest.raises(ModelBuildError, match="does not exist"):
        read_gguf(tmp_path / "none.gguf")


def test_lengths_beyond_the_file(tmp_path):
    """Lengths larger than the file would make the package gguf loop forever or read truncated arrays."""
    path = tmp_path / "model.gguf"
    magic = b"GGUF" + np.array([3], "<u4").tobytes()

    def number(*values):
        return np.array(values, "<u8").tobytes()

    array_of_bytes = number(1) + b"k" + np.array([9, 0], "<u4").tobytes()
    for content, message in (
        (number(1 << 60, 0), "expected at most 65536"),
        (number(0, 1) + number(1 << 62), "a name in the metadata, which has 4611686018427387904 bytes"),
        (number(0, 1) + array_of_bytes + number(1 << 60), "an array of 1152921504606846976 elements"),
        (number(0, 1) + array_of_bytes + number(1 << 20), "it ends inside 'k', which has 1048576 bytes"),
        (number(0, 1) + number(1) + b"k" + np.array([9, 9], "<u4").tobytes() + number(1), "an array of unknown type 9"),
        (number(1, 0) + number(1) + b"t" + np.array([9], "<u4").tobytes(), "tensor 't' has 9 axes"),
        (
            number(1, 0) + number(1) + b"t" + np.array([2], "<u4").tobytes() + number(1 << 40, 1 << 40)
            + np.array([0], "<u4").tobytes() + number(0),
            "tensor 't' ends at byte",
        ),
    ):  # fmt: skip
        path.write_bytes(magic + content)
        with pytest.raises(ModelBuildError, match=message):
            read_gguf(path)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path)
    return path.read_bytes()


def read_all(path):
    """Return whether the file can be read as a model. Errors other than OrtolanError are not caught."""
    try:
        model = read_model(path)
        read_gguf_tokenizer(model.file)
        build_llama({key: weight.floats() for key, weight in model.weights.items()}, model.config)
    except OrtolanError:
        return False
    return True


@examples(60)
@given(share=st.floats(0, 1, exclude_max=True))
def test_files_that_are_cut_short(content, tmp_path_factory, share):
    path = tmp_path_factory.mktemp("cut") / "model.gguf"
    path.write_bytes(content[: int(len(content) * share)])
    assert not read_all(path)


@examples(150)
@given(data=st.data())
def test_files_with_other_bytes(content, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("changed") / "model.gguf"
    changed = bytearray(content)
    header = content.index(b"blk.1.ffn_down.weight") + 200
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    read_all(path)
