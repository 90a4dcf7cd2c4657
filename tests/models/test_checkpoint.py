"""Models written as Hugging Face folders are the same after they are read again."""

import json
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ortolan.cache_folder import default_cache_dir
from ortolan.errors import OrtolanError
from ortolan.models import get_model
from ortolan.models.bert import BertConfig, build_bert
from ortolan.models.checkpoint import write_checkpoint, write_llama
from ortolan.models.gguf import read_gguf
from ortolan.models.llama import build_llama
from ortolan.models.llama_config import LlamaConfig
from ortolan.models.manifest import ManifestError, find_entry
from ortolan.models.mpnet import MpnetConfig, build_mpnet

from .gguf_file import CONFIG, TOKENS, write

safetensors = pytest.importorskip("safetensors.numpy")


def read_llama(folder):
    fields = json.loads((folder / "config.json").read_text())
    config = LlamaConfig(**{name: fields[name] for name in LlamaConfig.__dataclass_fields__ if name in fields})
    return build_llama(safetensors.load_file(folder / "model.safetensors"), config)


def answers(model, feeds):
    return ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, feeds)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_of_a_gguf_file(tmp_path, tied):
    path = tmp_path / "model.gguf"
    write(path, replace(CONFIG, tie_word_embeddings=tied))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_llama(path, folder, {"eos_token": TOKENS[1], "pad_token": TOKENS[0]})
    fields = json.loads((folder / "config.json").read_text())
    assert fields["model_type"] == "llama" and (fields["eos_token_id"], fields["pad_token_id"]) == (1, 0)
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert (folder / "tokenizer.json").is_file()
    config, weights = read_gguf(path)
    ids = np.array([[2, 5, 3, 8]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(4)[None]}
    expected_model = build_llama(weights, config)
    for value in expected_model.graph.inputs:
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros((1, config.num_key_value_heads, 0, config.head_size), np.float32)
    for found, expected in zip(answers(read_llama(folder), feeds), answers(expected_model, feeds), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_refusals(tmp_path):
    with pytest.raises(
        ManifestError, match="'stories15m' is not available as a checkpoint, expected one of all-minilm"
    ):
        write_checkpoint("stories15m", tmp_path / "folder")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(OrtolanError, match="is not empty"):
        write_checkpoint("all-minilm-l6-v2", tmp_path / "full")


@pytest.mark.network
def test_all_minilm(tmp_path):
    files = get_model("all-minilm-l6-v2")
    folder = write_checkpoint("all-minilm-l6-v2", tmp_path / "folder")
    weights = safetensors.load_file(folder / "model.safetensors")
    ids = np.array([[101, 7592, 102]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    (found,) = answers(build_bert(weights, BertConfig.from_json(folder / "config.json")), feeds)
    np.testing.assert_array_equal(found, ort.InferenceSession(files.onnx).run(None, feeds)[0])


@pytest.mark.network
def test_all_mpnet(tmp_path):
    name = "all-mpnet-base-v2"
    if not (default_cache_dir() / f"{name}-{find_entry(name).digest}").is_dir():
        pytest.skip(f"{name} has 404 MB to download; get_model({name!r}) does it")
    folder = write_checkpoint(name, tmp_path / "folder")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mpnet"
    assert json.loads((folder / "tokenizer_config.json").read_text())["pad_token"] == "<pad>"
    weights = safetensors.load_file(folder / "model.safetensors")
    ids = np.array([[0, 7596, 2]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    expected = ort.InferenceSession(get_model(name).onnx).run(None, feeds)[0]
    model = build_mpnet(weights, MpnetConfig.from_json(folder / "config.json"))
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    (found,) = ort.InferenceSession(tmp_path / "model.onnx").run(None, feeds)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.network
def test_smollm2(tmp_path):
    name = "smollm2-135m-instruct"
    if not (default_cache_dir() / f"{name}-{find_entry(name).digest}").is_dir():
        pytest.skip(f"{name} has 98 MB to download; get_model({name!r}) does it")
    folder = write_checkpoint(name, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["bos_token_id"]) == (576, 30, 1)
    assert safetensors.load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape == (49152, 576)
