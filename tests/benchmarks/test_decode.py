"""Parts of the decode benchmark on a tiny model: the MatMulNBits model, speeds and the profile."""

import argparse
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from rich.console import Console

from ortolan.benchmarks import decode
from ortolan.benchmarks.decode import (
    Speed,
    make_variants,
    measure,
    open_decoder,
    profile_decode,
    read_profile,
)
from ortolan.benchmarks.matmul_nbits import make_matmul_nbits
from ortolan.benchmarks.variants import read_recipes, session_options
from ortolan.errors import OrtolanError
from ortolan.models import tiny

PROMPT = [1, 20, 30, 4]


@pytest.fixture(params=["standard", "gqa"])
def model(request, tmp_path):
    path = tmp_path / "model.onnx"
    ir.save(tiny.tiny_llama(attention=request.param, hidden_size=64, intermediate_size=128, head_dim=16), path)
    return path


def logits(path):
    return open_decoder(path, session_options(1), 8).step(PROMPT)


@pytest.mark.parametrize(("block_size", "accuracy_level"), [(32, 0), (32, 4), (128, 4)])
def test_the_peer_is_the_same_model_in_4_bits(model, tmp_path, block_size, accuracy_level):
    path = tmp_path / "quantized.onnx"
    for _ in range(2):  # the second call must replace the first one's files
        make_matmul_nbits(model, path, block_size, accuracy_level)
    nodes = [node for node in ir.load(path).graph if node.op_type == "MatMulNBits"]
    assert len(nodes) == sum(len(value.shape) == 2 and value.name.endswith("weight_t") for value in weights_of(model))
    for node in nodes:
        options = {name: attribute.value for name, attribute in node.attributes.items()}
        assert (options["bits"], options["block_size"]) == (4, block_size)
        assert options.get("accuracy_level", 0) == accuracy_level
        assert len(node.inputs) == 3  # no zero points
    error = np.abs(logits(path) - logits(model))
    assert 0 < error.max() < 0.5 * np.abs(logits(model)).max()


def weights_of(path):
    return ir.load(path).graph.initializers.values()


def test_measure_counts_every_round_but_the_first(model):
    decoders = {name: open_decoder(model, session_options(1), 8) for name in "ab"}
    speeds = measure(decoders, PROMPT, decode_tokens=3, rounds=2)
    assert list(speeds) == ["a", "b"]
    for speed in speeds.values():
        assert speed.prompt.shape == (2,) and speed.decode.shape == (2, 3)
        assert (speed.decode > 0).all() and (speed.prompt > 0).all()
    assert all(decoder.length == len(PROMPT) + 3 for decoder in decoders.values())


def test_rates_by_hand():
    speed = Speed(10, np.array([2.0, 1.0, 4.0]), np.array([[1.0, 8.0], [2.0, 2.0], [3.0, 4.0]]))
    assert speed.prompt_rates == (10, 5)
    assert speed.decode_rates == (2 / 3, 2 / 6)


def test_the_profile_adds_up(model, tmp_path):
    options = session_options(1)
    rows, whole = profile_decode(lambda o: open_decoder(model, o, 16), options, PROMPT, 4, tmp_path)
    by_name = {(row.op_type, row.module): row for row in rows}
    assert by_name["MatMul", "lm_head"].nodes == 1
    assert by_name["MatMul", "down_proj"].nodes == tiny.TINY_LLAMA.num_hidden_layers
    # The medians of nodes do not add up to the median of the run, but to a similar time.
    assert 0 < sum(row.microseconds for row in rows) < 2 * whole


def test_a_profile_without_runs_is_refused(tmp_path):
    (tmp_path / "profile.json").write_text('[{"name": "model_run", "cat": "Session", "ts": 1, "dur": 5}]')
    with pytest.raises(OrtolanError, match="has no runs after the first 2"):
        read_profile(tmp_path / "profile.json", skip_runs=2)
    assert read_profile(tmp_path / "profile.json", skip_runs=0) == ([], 5)


@pytest.mark.slow
def test_the_default_variants_are_in_4_bits_and_stay_in_their_folder(model, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "get_model", lambda *names, **options: SimpleNamespace(onnx=model))
    arguments = argparse.Namespace(model="tiny", attention=["gqa"], variant=[f"mine={model.parent}"])
    recipes = read_recipes(decode.RECIPES, [])
    variants = make_variants(arguments, recipes, tmp_path, Console(quiet=True))
    assert list(variants) == ["fp32", *decode.PEERS, "int4", "int4 group_size=128", "mine"]
    assert variants.pop("mine") == model
    for name, path in variants.items():
        nodes = list(ir.load(path).graph)
        found = [node.attributes.get("block_size") or node.attributes.get("group_size") for node in nodes]
        size = {"fp32": None, "MatMulNBits g32": 32, "int4": 256}.get(name, 128)
        head = {64} if name.startswith("int4") else set()
        assert {attribute.as_int() for attribute in found if attribute} - {0} == ({size} | head if size else set())
        # All quantized models have a quantized head as well.
        dense = [node for node in nodes if node.op_type == "MatMul" and node.inputs[1].is_initializer()]
        assert bool(dense) == (name == "fp32")
        error = np.abs(logits(path) - logits(model))
        assert error.max() < 0.5 * np.abs(logits(model)).max()
    for maker in ("optimize_onnx", "make_matmul_nbits"):
        monkeypatch.setattr(decode, maker, lambda *names, **options: pytest.fail("made again"))
    assert make_variants(arguments, recipes, tmp_path, Console(quiet=True)) == variants | {"mine": model}


def test_perplexity_is_that_of_the_text(model):
    ids = np.random.default_rng(0).integers(0, tiny.TINY_LLAMA.vocab_size, 40).tolist()
    decoder = open_decoder(model, session_options(1), 64)
    shifted = decoder.step(ids).astype(np.float64)
    chances = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    expected = np.exp(-np.log(chances[np.arange(39), ids[1:]]).mean())
    assert decode.perplexity(model, ids) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--variant", "mine=none.onnx"), "expected NAME=PATH of an ONNX file, found 'mine=none.onnx'"),
        (("--text", "none.txt"), "--text: file 'none.txt' does not exist"),
        (("--recipe", "int5"), "--recipe: unknown recipe 'int5'"),
        (("--recipe", "int4:scope=layer"), "--recipe: recipe 'int4' has no option 'scope'"),
        (("--recipe", "int4:symmetric"), "--recipe: setting 'symmetric' is not of the form name=value"),
    ],
)
def test_what_there_is_none_of_is_refused(arguments, words):
    command = [sys.executable, "-P", "-m", "ortolan.benchmarks.decode", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert words in result.stderr
