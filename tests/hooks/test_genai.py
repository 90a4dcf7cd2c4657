"""onnxruntime-genai generates text from folders that Ortolan has optimized.

Skipped if onnxruntime-genai is not installed.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tokenizers import Tokenizer

import ortolan
from ortolan.engine import Engine, Request, SamplingOptions
from ortolan.engine.model import PagedModel
from ortolan.models import tiny
from ortolan.provider import PROVIDER

from ..recipes.forms import NAMED
from .folders import write_llama

genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")

FAST = {"verify.seconds": 0.0}
EXACT = FAST | {"keys": "float32", "values": "float32"}
PROMPT = [5, 17, 8, 11, 20]


def hand_made(folder: Path) -> Path:
    folder.mkdir()
    ir.save(tiny.tiny_llama(attention="gqa", head_dim=16), folder / "model.onnx")
    config = {
        "model": {
            "type": "llama",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "context_length": 64,
            "vocab_size": 97,
            "decoder": {
                "session_options": {"provider_options": []},
                "filename": "model.onnx",
                "head_size": 16,
                "hidden_size": 48,
                "num_attention_heads": 4,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": 64, "do_sample": False, "past_present_share_buffer": True},
    }
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that builds a small random Llama with GenAI's builder: built(precision) -> folder."""

    @cache
    def build(precision: str) -> Path:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        parent = tmp_path_factory.mktemp(precision)
        checkpoint, folder = write_llama(parent / "checkpoint"), parent / "model"
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", folder]
        options = ["-p", precision, "-e", "cpu", "-c", parent / "cache", "--extra_options", "int4_block_size=32"]
        done = subprocess.run([*builder, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return folder

    return build


@pytest.fixture(params=["hand_made", "fp32", "int4"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, built: Callable[[str], Path]) -> Path:
    return hand_made(tmp_path / "model") if request.param == "hand_made" else built(request.param)


@pytest.fixture
def float_folder(tmp_path: Path) -> Path:
    return hand_made(tmp_path / "model")


def generate(folder: Path, share_buffer: bool = True, tokens: int = 24, **search: Any) -> list[int]:
    """Return the tokens after the prompt, and check that the folder's operator library is loaded.

    Libraries of earlier tests may still be loaded, such as one with the execution provider.
    """
    model = genai.Model(str(folder))
    assert {str(path) for path in folder.glob("libortolan_ops.so")} <= loaded_libraries()
    return generate_with(model, share_buffer, tokens, **search)


def generate_with(model: Any, share_buffer: bool = True, tokens: int = 24, **search: Any) -> list[int]:
    parameters = genai.GeneratorParams(model)
    length = len(PROMPT) + tokens
    parameters.set_search_options(
        max_length=length, min_length=length, do_sample=False, past_present_share_buffer=share_buffer, **search
    )
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array(PROMPT, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[len(PROMPT) :]]


def loaded_libraries() -> set[str]:
    """Return the paths of all operator libraries that are loaded in this process."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libortolan_ops" in line}


@pytest.mark.parametrize("share_buffer", [True, False])
def test_exact_settings_generate_the_same_tokens(folder: Path, tmp_path: Path, share_buffer: bool) -> None:
    ortolan.optimize_onnx(folder, tmp_path / "fast", recipe="long-context", options=EXACT)
    expected = generate(folder, share_buffer)
    assert len(set(expected)) > 5
    assert generate(tmp_path / "fast", share_buffer) == expected


def operators(folder: Path) -> list[str]:
    return [node.op_type for node in ir.load(folder / "model.onnx").graph]


@pytest.mark.parametrize("share_buffer", [True, False])
def test_adopted_layers_generate(tmp_path: Path, built: Callable[[str], Path], share_buffer: bool) -> None:
    folder = built("int4")
    report = ortolan.optimize_onnx(folder, tmp_path / "fast", options=FAST)
    assert report.recipe["name"] == "weights as stored"
    assert operators(tmp_path / "fast").count("NoMADAttention") == 2
    # The models sum in a different order, so an int8 activation may round differently and change later tokens.
    assert generate(tmp_path / "fast", share_buffer)[:4] == generate(folder, share_buffer)[:4]


def test_other_recipes_generate(float_folder: Path, tmp_path: Path) -> None:
    for recipe in ("sparse-bf16", "sparse-int8", "int4"):
        ortolan.optimize_onnx(float_folder, tmp_path / recipe, recipe=NAMED[recipe], options=FAST | {"may_grow": True})
        assert operators(tmp_path / recipe).count("NoMADAttention") == 2
        found = generate(tmp_path / recipe)
        assert len(found) == 24 and found == generate(tmp_path / recipe, share_buffer=False)


@pytest.mark.parametrize("share_buffer", [True, False])
def test_compressed_caches(float_folder: Path, tmp_path: Path, share_buffer: bool) -> None:
    calibration = [{"input_ids": np.random.default_rng(0).integers(0, 97, (1, 300))}]
    ortolan.optimize_onnx(float_folder, tmp_path / "fast", recipe="long-context", options=FAST, calibration=calibration)
    found = generate(tmp_path / "fast", share_buffer)
    assert len(found) == 24
    assert found[0] == generate(float_folder, share_buffer)[0]  # attention reads no cache for the first token


def test_the_folder_may_move(float_folder: Path, tmp_path: Path) -> None:
    ortolan.optimize_onnx(float_folder, tmp_path / "fast", recipe="long-context", options=EXACT)
    expected = generate(tmp_path / "fast")
    (tmp_path / "fast").rename(tmp_path / "moved")
    assert generate(tmp_path / "moved") == expected


def test_imported_gguf(tmp_path: Path) -> None:
    gguf_file = pytest.importorskip("tests.models.gguf_file")
    gguf_file.write(tmp_path / "model.gguf", table="Q8_0")
    ortolan.import_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    assert len(generate(tmp_path / "folder")) == 24
    assert generate(tmp_path / "folder", share_buffer=False) == generate(tmp_path / "folder")
    tokenizer = genai.Tokenizer(genai.Model(str(tmp_path / "folder")))
    text = tokenizer.apply_chat_template(json.dumps([{"role": "user", "content": "ab ab12"}]))
    assert text == "ab ab12"
    known = Tokenizer.from_file(str(tmp_path / "folder/tokenizer.json"))
    for line in (text, "a b", "abé ab\n3", "<|endoftext|>ab"):
        assert list(tokenizer.encode(line)) == known.encode(line).ids


@pytest.fixture
def registered() -> Iterator[None]:
    """Register the provider in GenAI, which does not use the registrations of the Python package onnxruntime."""
    genai.register_execution_provider_library("ortolan", ortolan.get_library_path())
    try:
        yield
    finally:
        gc.collect()  # models must be gone before the provider is unregistered
        genai.unregister_execution_provider_library("ortolan")


def taken(claims: Path) -> list[bool]:
    """Return whether each node that the provider supports was claimed, in model order."""
    lines = [json.loads(line) for line in claims.read_text().splitlines()]
    return [line["taken"] for line in lines if "node" in line]


@pytest.mark.parametrize("share_buffer", [True, False])
def test_the_provider_by_name(
    registered: None, tmp_path: Path, built: Callable[[str], Path], share_buffer: bool
) -> None:
    folder = built("int4")
    config = genai.Config(str(folder))
    config.clear_providers()
    config.append_provider(PROVIDER)
    config.set_provider_option(PROVIDER, "claims_file", str(tmp_path / "claims.jsonl"))
    found = generate_with(genai.Model(config), share_buffer)
    assert taken(tmp_path / "claims.jsonl") == [True] * 13  # 6 nodes in each of 2 layers, and the head
    assert len(set(found)) > 5
    # The models sum in a different order, so an int8 activation may round differently and change later tokens.
    assert found[:4] == generate(folder, share_buffer)[:4]


def test_the_provider_in_the_configuration(registered: None, tmp_path: Path, built: Callable[[str], Path]) -> None:
    shutil.copytree(built("int4"), tmp_path / "model")
    path = tmp_path / "model" / "genai_config.json"
    config = json.loads(path.read_text())
    options = {"claims_file": str(tmp_path / "claims.jsonl")}
    config["model"]["decoder"]["session_options"]["provider_options"] = [{PROVIDER: options}]
    path.write_text(json.dumps(config))
    assert generate(tmp_path / "model")[:4] == generate(built("int4"))[:4]
    assert taken(tmp_path / "claims.jsonl") == [True] * 13


def test_the_provider_and_an_optimized_folder(registered: None, tmp_path: Path, built: Callable[[str], Path]) -> None:
    """Operators are registered only once, and the provider claims the nodes that were not replaced."""
    left = {"fuse_cached_attention.exclude": ["*"]}
    ortolan.optimize_onnx(built("int4"), tmp_path / "fast", options=FAST | left)
    config = genai.Config(str(tmp_path / "fast"))
    config.clear_providers()
    config.append_provider(PROVIDER)
    config.set_provider_option(PROVIDER, "claims_file", str(tmp_path / "claims.jsonl"))
    assert generate_with(genai.Model(config)) == generate(tmp_path / "fast")
    assert taken(tmp_path / "claims.jsonl") == [True] * 2


def test_genai_does_not_know_what_python_has_registered(built: Callable[[str], Path]) -> None:
    """Without GenAI's own registration (docs/genai.md), the provider is unknown."""
    ortolan.register_provider()
    config = genai.Config(str(built("int4")))
    config.append_provider(PROVIDER)
    with pytest.raises(RuntimeError, match=f"Unknown provider name '{PROVIDER}'"):
        genai.Model(config)


def run_engine(engine: Any, waiting: list[list[int]], at_once: int, tokens: int = 24) -> list[list[int]]:
    """Return the answers of GenAI's Engine; a request begins with each call after the first `at_once` requests."""
    events, requests, answers = engine.create_event_buffer(64), [], []
    while engine.has_pending_requests() or len(requests) < len(waiting):
        for prompt in waiting[len(requests) : max(at_once, len(requests) + 1)]:
            requests.append(engine.create_request())
            answers.append([])
            options = genai.TurnOptions(requests[-1])
            options.set_do_sample(False)
            options.set_min_generated_tokens(tokens)
            options.set_max_generated_tokens(tokens)
            requests[-1].begin_turn(np.array(prompt, np.int32), options)
        for event in engine.run(events):
            assert event.error_code == genai.EngineErrorCode.NONE
            if event.flags.value & genai.EngineEventFlags.TOKEN.value:
                answers[next(i for i, one in enumerate(requests) if one is event.request)].append(event.token)
    return answers


@pytest.mark.parametrize("chunk", [0, 8])
def test_its_engine_batches_requests(folder: Path, tmp_path: Path, chunk: int) -> None:
    """GenAI's Engine gives the tokens of Ortolan's, whatever else it runs and however prompts are cut."""
    target = tmp_path / "serving"
    ortolan.optimize_onnx(folder, target, serve=True, allow_different=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, length).tolist() for length in (5, 17, 30, 1, 16, 33, 9, 12)]
    ends = json.loads((target / "genai_config.json").read_text())["model"]["eos_token_id"]
    bias = dict.fromkeys(ends if isinstance(ends, list) else [ends], -1e9)
    sampling = SamplingOptions(temperature=0, logit_bias=bias)
    with Engine(PagedModel.open(target)) as own:
        streams = [own.submit(Request(tuple(prompt), max_tokens=24, sampling=sampling)) for prompt in prompts]
        expected = [[token for output in stream for token in output.tokens] for stream in streams]
    config = genai.Config(str(target))
    if chunk:
        config.overlay(json.dumps({"engine": {"dynamic_batching": {"max_scheduled_tokens": chunk}}}))
    engine = genai.Engine(genai.Model(config))
    assert len({tuple(answer) for answer in expected}) == len(expected)
    assert run_engine(engine, prompts, 8) == expected
    assert run_engine(engine, prompts, 1) == expected
    assert run_engine(engine, prompts[3:4], 1) == expected[3:4]
