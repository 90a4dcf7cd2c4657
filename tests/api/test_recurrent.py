"""Hybrid decoders: recurrent states beside keys and values, in Decoder, in the engine, and optimized."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ortolan
from ortolan.engine import Engine, Request, SamplingOptions
from ortolan.engine.recurrent import RecurrentModel
from ortolan.errors import ArgumentError
from ortolan.generate import Decoder, generate, shares_cache
from ortolan.server.conversion import model_kind, serving_folder

from .hybrid import LAYERS, SIZE, hybrid

PROMPT = [5, 17, 8, 11, 20]
EXACT = {"keys": "float32", "values": "float32", "verify.seconds": 0.0}


@pytest.fixture(scope="module", params=LAYERS)
def file(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "model.onnx"
    onnx.save(hybrid(request.param), path)
    try:
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        pytest.skip(f"ONNX Runtime {ort.__version__} has no operators of hybrids: {error}")
    return path


def session(file: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("cache_length", [None, 16])
@pytest.mark.parametrize("cuts", [(5,), (1, 2, 3, 4, 5, 6), (2, 4)], ids=str)
def test_states_pass_from_step_to_step(file: Path, cuts: tuple[int, ...], cache_length: int | None) -> None:
    ids = np.array([*PROMPT, 3, 40])
    expected = Decoder(session(file)).step(ids)
    decoder = Decoder(session(file), cache_length)
    for _ in range(2):
        found = np.concatenate([decoder.step(part) for part in np.split(ids, cuts)])
        np.testing.assert_allclose(found, expected, atol=1e-5)
        decoder.reset()
    assert shares_cache(file)


def test_states_are_kept_and_not_rewound(file: Path) -> None:
    decoder, other = Decoder(session(file), 16), Decoder(session(file), 16)
    decoder.step(PROMPT)
    other.fill(decoder.cache(), len(PROMPT))
    assert np.abs(decoder.cache()["past.0.recurrent"]).max() > 0
    np.testing.assert_array_equal(other.step([7]), decoder.step([7]))
    with pytest.raises(ArgumentError, match=r"recurrent states, such as 'past.0.conv', which cannot be rewound"):
        decoder.rewind(3)
    with pytest.raises(ArgumentError, match="rewindable is 4, expected 0: the model has recurrent states"):
        Decoder(session(file), 16, rewindable=4)


def test_exact_settings_generate_the_same_tokens(file: Path, tmp_path: Path) -> None:
    report = ortolan.optimize_onnx(file, tmp_path / "exact.onnx", recipe="long-context", options=EXACT)
    assert report.output_error
    nodes = onnx.load(tmp_path / "exact.onnx").graph.node
    assert {node.op_type for node in nodes if node.domain == "ai.ortolan"} == {"NoMADAttention", "LinearAttention"}
    assert {node.op_type for node in nodes if node.domain == "com.microsoft"} == {"CausalConvWithState"}
    expected = generate(session(file), PROMPT, 24)
    assert len(set(expected)) > 5
    assert generate(ortolan.create_session(tmp_path / "exact.onnx"), PROMPT, 24) == expected
    shared = Decoder(ortolan.create_session(tmp_path / "exact.onnx"), 64, SIZE)
    assert shares_cache(tmp_path / "exact.onnx")
    assert generate(shared, PROMPT, 24) == expected


def test_linear_layers_are_replaced(file: Path, tmp_path: Path) -> None:
    report = ortolan.optimize_onnx(
        file, tmp_path / "bf16.onnx", weights="bf16", cache="float32", options={"may_grow": True}
    )
    assert [layer.reason for layer in report.layers if layer.status != "replaced"] == []
    assert min(one.cosine for one in report.output_error) > 0.9999
    nodes = [node.node for node in ortolan.inspect_provider(file, precision="bf16", claims="all").nodes if node.taken]
    assert len(nodes) >= 8


def folder_of(file: Path, folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    (folder / "model.onnx").write_bytes(file.read_bytes())
    words = {f"w{index}": index for index in range(61)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 60}))
    return folder


def test_the_engine_continues_states_and_computes_lost_ones_again(file: Path, tmp_path: Path) -> None:
    folder = folder_of(file, tmp_path / "model")
    assert model_kind(folder) == "recurrent" and serving_folder(folder, tmp_path / "cache") == folder
    prompts = [PROMPT, [*range(40)], [*range(40), 7, 8], PROMPT[::-1]]
    expected = [generate(session(file), prompt, 20) for prompt in prompts]
    # Fewer decoders than sequences: states are lost, and prompts share their first blocks.
    model = RecurrentModel.open(folder, context=128, sequences=2)
    with Engine(model, speculation=None, max_sequences=3, max_step_tokens=16) as engine:
        greedy = SamplingOptions(temperature=0)
        streams = [engine.submit(Request(tuple(prompt), 20, greedy)) for prompt in prompts]
        found = [[token for output in stream for token in output.tokens] for stream in streams]
    assert found == expected
