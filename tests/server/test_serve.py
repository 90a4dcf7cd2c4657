"""serve with a small model of random weights: conversion, folders, commands, signals; and conversations."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import onnx
import onnx_ir as ir
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
tokenizers = pytest.importorskip("tokenizers")


from ortolan.cli_serve import CacheTypes, read_bytes  # noqa: E402
from ortolan.conversation import AnswerOptions, complete  # noqa: E402
from ortolan.engine import Request, SamplingOptions  # noqa: E402
from ortolan.engine.model import CacheType  # noqa: E402
from ortolan.errors import ArgumentError, ModelError, OrtolanError  # noqa: E402
from ortolan.graph_passes.measure.machine import usable_memory  # noqa: E402
from ortolan.importer import import_gguf  # noqa: E402
from ortolan.models import tiny  # noqa: E402
from ortolan.server.conversion import model_kind, serving_folder  # noqa: E402
from ortolan.server.draft_check import check_same_tokens  # noqa: E402
from ortolan.server.model_folder import read_model_folder  # noqa: E402
from ortolan.server.run import ServeOptions, model_name, open_application, open_engine, prepare_model, serve  # noqa: E402
from ortolan.server.start_checks import check_engine_options  # noqa: E402

from ..models.gguf_file import CONFIGS  # noqa: E402
from ..models.gguf_file import write as write_gguf  # noqa: E402
from ..passes.cached_llama import llama  # noqa: E402
from ..text.reranker import write_reranker  # noqa: E402
from ..text.wordpiece_file import write_wordpiece  # noqa: E402
from .commands import LIMITS, invoke  # noqa: E402
from .scripted import END, running  # noqa: E402

LIMIT = CONFIGS["llama"].max_position_embeddings
BLOCK = 16 * 2 * 2 * CONFIGS["llama"].num_hidden_layers * CONFIGS["llama"].num_key_value_heads * 16  # bytes
SMALL = ServeOptions(threads=1, context=128, cache_bytes=1 << 22)


def test_a_decoder_is_converted_once(folder, prepared, tmp_path):
    assert (model_kind(folder), model_kind(prepared)) == ("decoder", "serving")
    assert (prepared / "tokenizer.json").is_file()
    assert prepared.name.startswith("small-")
    assert prepare_model(prepared) == prepared
    cache = prepared.parent.parent
    before = (prepared / "model.onnx").stat().st_mtime_ns
    assert serving_folder(folder, cache) == prepared
    assert (prepared / "model.onnx").stat().st_mtime_ns == before
    (folder / "new.txt").touch()  # another version of the folder
    try:
        assert serving_folder(folder, tmp_path).name != prepared.name
    finally:
        (folder / "new.txt").unlink()


def test_another_version_of_the_form_is_made_again(folder, prepared, monkeypatch):
    monkeypatch.setattr("ortolan.graph_passes.serve.form.FORM_VERSION", "paged next")
    made = serving_folder(folder, prepared.parent.parent)
    assert made != prepared and model_kind(made) == "serving"
    with pytest.raises(ModelError, match=r"version 'paged 1' of the form for serving, expected 'paged next'"):
        model_kind(prepared)


def test_a_gguf_file_is_converted_once(tmp_path):
    path = tmp_path / "tiny-0.5B.gguf"
    write_gguf(path, CONFIGS["llama"])
    found = serving_folder(path, tmp_path / "cache")
    assert found.name.startswith("tiny-0.5B-")
    assert (found.parent / f"{found.name}.lock").is_file()
    assert found == serving_folder(path, tmp_path / "cache")
    assert model_kind(found) == "serving"
    assert read_model_folder(found).template is not None
    assert read_model_folder(found).sampling == {}


@pytest.mark.parametrize(("content", "reason"), [(b"junk" * 9, "is not a GGUF file"), (b"", "cannot be read")])
def test_a_file_that_is_no_gguf_file(content, reason, tmp_path):
    path = tmp_path / "junk.gguf"
    path.write_bytes(content)
    said = []
    with pytest.raises(OrtolanError, match=reason):
        serving_folder(path, tmp_path / "cache", say=said.append)
    assert not said and not (tmp_path / "cache").exists()


CONVERT = """
import sys, time
from pathlib import Path
from ortolan.server.conversion import serving_folder

source, cache, holds = Path(sys.argv[1]), Path(sys.argv[2]), len(sys.argv) > 3

def wait(stage, done, total):
    if holds and stage == "save":
        print("holds", flush=True)
        time.sleep(600)

print(serving_folder(source, cache, wait, lambda line: print(line, flush=True)), flush=True)
"""


def test_two_processes_that_convert_the_same_file(tmp_path):
    """The second one waits, and converts the file itself when the first one is killed, whose files are removed."""
    source, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(source, CONFIGS["llama"])
    command = [sys.executable, "-P", "-c", CONVERT, str(source), str(cache)]
    with subprocess.Popen([*command, "holds"], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "converting m.gguf to the form for serving (once)\n"
            assert first.stdout.readline() == "holds\n"
            assert any(one.name.startswith(".m-") for one in (cache / "serving").iterdir())
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
                try:
                    assert second.stdout.readline() == "waiting for another process, which is converting m.gguf\n"
                    first.kill()
                    assert second.stdout.readline() == "converting m.gguf to the form for serving (once)\n"
                    made = Path(second.stdout.readline().strip())
                    assert second.wait(60) == 0
                finally:
                    second.kill()
        finally:
            first.kill()
    assert sorted(one.name for one in made.parent.iterdir()) == [made.name, f"{made.name}.lock"]
    assert serving_folder(source, cache) == made


def test_a_link_to_a_file_keeps_its_name(tmp_path, monkeypatch):
    write_gguf(tmp_path / "blob", CONFIGS["llama"])
    link = tmp_path / "tiny-0.5B.gguf"
    link.symlink_to("blob")
    assert model_name(link) == "tiny-0.5B"
    assert serving_folder(link, tmp_path / "cache").name.startswith("tiny-0.5B-")
    monkeypatch.chdir(tmp_path)
    assert model_name(Path()) == tmp_path.name


def test_sampling_options_of_a_gguf_file(tmp_path):
    path = tmp_path / "tiny.gguf"
    said = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.min_p": float("nan")}
    write_gguf(path, CONFIGS["llama"], metadata=said)
    folder = serving_folder(path, tmp_path / "cache")
    assert read_model_folder(folder).sampling == {"temperature": 0.5, "top_k": 20}
    assert json.loads((folder / "generation_config.json").read_text())["do_sample"] is True


def test_sampling_options_in_the_terminal():
    """A model that recommends nothing gets llama.cpp's defaults, unlike in the server."""
    found = AnswerOptions(temperature=0.3).sampling({})
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.3, 40, 0.95, 0.05)
    found = AnswerOptions().sampling({"top_k": 20.0})
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (1, 20, 1, 0)


def test_models_that_cannot_be_served(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        prepare_model(tmp_path / "nothing")
    (tmp_path / "file.txt").touch()
    with pytest.raises(OrtolanError):
        prepare_model(tmp_path / "file.txt")
    (tmp_path / "model.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(ModelError, match="its 2 bytes are not a protobuf message; give an ONNX file"):
        prepare_model(tmp_path)
    (tmp_path / "model.onnx").unlink()
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=re.escape(f"ortolan serve {tmp_path / 'm.gguf'}")):
        prepare_model(tmp_path)


def test_a_folder_that_was_imported_without_the_form_for_serving(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", CONFIGS["llama"])
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "imported")
    with pytest.raises(ModelError, match=r"give the GGUF file .* --serve"):
        prepare_model(tmp_path / "imported")


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_encoder_does_not_chat(command, tmp_path):
    write_wordpiece(tmp_path / "tokenizer.json")
    write_reranker(tmp_path, vocab_size=256)
    found = invoke(command, tmp_path, *(["hi"] if command == "generate" else []))
    assert found.exit_code == 1
    assert "expected a decoder; use ortolan embed, rerank or serve" in found.output


def test_what_a_folder_says(prepared):
    read = read_model_folder(prepared)
    assert read.end_tokens == {read.tokenizer.token_to_id(END)}
    assert read.sampling == {"temperature": 0.5, "top_k": 20.0}
    assert (read.tool_family, read.thoughts.end) == ("hermes", "</think>")
    call = read.encode("<tool_call>", whole=True)
    assert read.tokenizer.decode(call) == "<tool_call>"  # in spite of being a special token in the file
    assert read.tokenizer.decode(read.encode(f"a{END}", whole=True)) == "a"
    assert read_model_folder(prepared, "mistral").tool_family == "mistral"
    with pytest.raises(ModelError, match="hermes"):
        read_model_folder(prepared, "morse")


@pytest.mark.parametrize(
    "said", [{"top_p": 7}, {"top_p": 0}, {"temperature": "hot"}, {"min_p": True}, {"repetition_penalty": 0.0}]
)
def test_malformed_defaults(said, tmp_path):
    from ortolan.server.model_folder import read_sampling

    (tmp_path / "generation_config.json").write_text(json.dumps({**said, "do_sample": False}))
    assert read_sampling(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=next(iter(said))):
        read_sampling(tmp_path)


def test_answers_of_a_real_session(prepared):
    """Answers do not depend on what else is being served, and log probabilities have the same bits."""
    with open_application(prepared, SMALL) as application, running(application) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        prompts = ["Once", "upon a time", "there", "was a cat that sat"]
        asked = {"model": "x", "max_tokens": 20, "seed": 3, "logprobs": 2}
        alone = [client.completions.create(prompt=prompt, **asked).choices[0] for prompt in prompts]
        together = client.completions.create(prompt=prompts, **asked).choices
        for one, other in zip(alone, together, strict=True):
            assert one.text == other.text
            assert one.logprobs.token_logprobs == other.logprobs.token_logprobs


def test_an_encoder(tmp_path):
    write_wordpiece(tmp_path / "tokenizer.json")
    write_reranker(tmp_path, vocab_size=256)
    assert (model_kind(tmp_path), prepare_model(tmp_path)) == ("encoder", tmp_path)
    with open_application(tmp_path, ServeOptions(threads=1)) as application, running(application) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        found = client.post("/rerank", body={"query": "a", "documents": ["b", "c"]}, cast_to=object)
        assert len(found["results"]) == 2
    with pytest.raises(OrtolanError, match="--encoder"), open_application(tmp_path, ServeOptions(encoder=tmp_path)):
        pass


def test_a_decoder_and_an_encoder(prepared, tmp_path):
    write_wordpiece(tmp_path / "tokenizer.json")
    onnx.save(ir.to_proto(tiny.tiny_bert(vocab_size=256)), tmp_path / "model.onnx")
    options = ServeOptions(threads=1, context=64, cache_bytes=1 << 22, encoder=tmp_path, name="both")
    with open_application(prepared, options) as application, running(application) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert [one.id for one in client.models.list()] == ["both", model_name(tmp_path)]
        assert len(client.embeddings.create(model="x", input="a").data[0].embedding) > 1


def test_a_port_in_use(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OrtolanError, match="--port"):
            serve(folder, ServeOptions(port=taken.getsockname()[1]))


def test_the_port_of_a_server_that_still_converts_its_model(folder, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def say(_: str) -> None:
        with pytest.raises(OrtolanError, match="--port"):
            serve(folder, ServeOptions(port=port))
        raise Stop

    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", CONFIGS["llama"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Stop):
        serve(tmp_path / "tiny.gguf", ServeOptions(port=port), say=say)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_the_machine_has_not(folder, host):
    with pytest.raises(OrtolanError, match=f"cannot listen on {host} .*; choose another with --host"):
        serve(folder, ServeOptions(host=host, port=0))


@pytest.mark.parametrize(
    ("number", "options", "cache"),
    [(signal.SIGTERM, [], "cache"), (signal.SIGINT, ["--cache-type", "int8", "--share-weights"], "int8 cache")],
)
def test_the_command_serve(prepared, number, options, cache):
    command = [sys.executable, "-m", "ortolan", "serve", str(prepared), "--port", "0", "--threads", "1"]
    command += ["--context", "128", "--cache-memory", "4M", "--name", "mine", *options]
    environment = {**os.environ, "ORTOLAN_API_KEY": "secret"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stderr.readline()
            url = re.fullmatch(
                rf"serving mine on (http://127\.0\.0\.1:\d+) \(context 128 tokens, {cache} 4\.0 MiB\)\n", line
            )[1]
            with pytest.raises(openai.AuthenticationError):
                openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret")
            answer = client.chat.completions.create(
                model="mine", messages=[{"role": "user", "content": "hi"}], max_tokens=5, temperature=0
            )
            assert answer.model == "mine"
            assert 1 <= answer.usage.completion_tokens <= 5
            process.send_signal(number)
            assert process.wait(60) == 0
            assert process.stderr.read() == "shutting down\n"
        finally:
            process.kill()


def test_errors_come_before_the_conversion(monkeypatch):
    def convert(*_):
        raise AssertionError("converted")

    monkeypatch.setattr("ortolan.server.run.prepare_model", convert)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        found = invoke("serve", "model.gguf", "--port", busy.getsockname()[1])
    assert found.exit_code == 1 and "cannot listen on 127.0.0.1" in found.output
    found = invoke("serve", "model.gguf", "--port", 0, "--tool-calls", "morse")
    assert found.exit_code == 1 and "'morse', expected one of hermes" in found.output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--context", LIMIT + 1], f"context is {LIMIT + 1}, expected 1 to the model's {LIMIT} tokens"),
        (["--cache-memory", "500T"], f"{usable_memory():,} bytes"),
        (["--cache-memory", "100"], f"the cache has 100 bytes, but a sequence of 1 tokens needs {BLOCK:,} bytes"),
        (["--threads", 100_000], "threads is 100000, expected 1 to "),
        (["--max-step-tokens", 20, "--max-sequences", 32], "max-step-tokens is 20, expected at least 32"),
        (["--max-seconds", "inf"], "max-seconds is inf, expected a finite number above 0"),
        (["--api-key", ""], "the API key is empty"),
        (["--api-key", "a\n"], "the API key is surrounded by spaces"),
        (["--allow-origin", "http://localhost:3000/"], "the allowed origin is 'http://localhost:3000/', expected"),
        (["--encoder", "missing"], "missing"),
        (["--chat-template", "missing.jinja"], "'missing.jinja' cannot be read: No such file or directory\n"),
    ],
)
def test_options_are_checked_before_the_conversion(options, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("ortolan.server.conversion._convert", None)
    write_gguf(tmp_path / "m.gguf", CONFIGS["llama"])
    found = invoke("serve", tmp_path / "m.gguf", "--port", 0, *options)
    assert found.exit_code == 1 and reason in found.output


@pytest.mark.parametrize("command", [["chat"], ["generate", "hi"]])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--context", LIMIT + 1], f"context is {LIMIT + 1}"),
        (["--cache-memory", "500T"], "cache memory is"),
        (["--threads", 100_000], "threads is"),
        (["--chat-template", "missing.jinja"], "cannot be read"),
    ],
)
def test_options_of_the_terminal_are_checked_before_the_conversion(command, options, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("ortolan.server.conversion._convert", None)
    write_gguf(tmp_path / "m.gguf", CONFIGS["llama"])
    found = invoke(command[0], tmp_path / "m.gguf", *command[1:], *options)
    assert found.exit_code == 1 and reason in found.output


def test_a_draft_model_of_other_tokens_is_refused_before_the_conversion(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("ortolan.server.conversion._convert", None)
    write_gguf(tmp_path / "m.gguf", CONFIGS["llama"])
    write_gguf(tmp_path / "wide.gguf", replace(CONFIGS["llama"], vocab_size=120))
    other = tmp_path / "other"
    other.mkdir()
    onnx.save(llama("gqa"), other / "model.onnx")
    write_wordpiece(other / "tokenizer.json")
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    write_reranker(encoder, vocab_size=256)
    for model, draft, reason in (
        ("m.gguf", "wide.gguf", "has a vocabulary of 120 tokens, expected 97, as .*m.gguf' has"),
        (folder, "m.gguf", "has a vocabulary of 97 tokens, expected"),
        (
            "m.gguf",
            "other",
            r"tokens of the draft model .*other' are not those .*: token 0 is '.*', expected '<\|end",
        ),
        ("m.gguf", "missing.gguf", "missing.gguf"),
        ("m.gguf", "encoder", "encoder' is an embedding model or a reranker, expected a decoder"),
        ("encoder", "m.gguf", "encoder' is an embedding model or a reranker, expected a decoder"),
    ):
        with pytest.raises(OrtolanError, match=reason):
            check_engine_options(tmp_path / model, ServeOptions(draft_model=tmp_path / draft))
    with pytest.raises(ArgumentError, match="speculate is off, but there is a draft model"):
        check_engine_options(folder, ServeOptions(draft_model=folder, speculate="off"))
    check_engine_options(tmp_path / "m.gguf", ServeOptions(draft_model=tmp_path / "m.gguf"))


def test_tokens_of_a_gguf_file_that_was_converted_are_read_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", CONFIGS["llama"])
    write_gguf(tmp_path / "same.gguf", CONFIGS["llama"])
    serving_folder(tmp_path / "m.gguf", tmp_path / "cache")
    check_same_tokens(tmp_path / "m.gguf", tmp_path / "same.gguf")
    monkeypatch.setattr("ortolan.models.gguf.model.read_model", None)
    check_same_tokens(tmp_path / "m.gguf", tmp_path / "m.gguf")
    with pytest.raises(TypeError):
        check_same_tokens(tmp_path / "m.gguf", tmp_path / "same.gguf")


def test_special_tokens_of_a_draft_model_may_differ(tmp_path):
    for name, different in (("a", 0), ("b", 1), ("c", 9)):
        (tmp_path / name).mkdir()
        onnx.save(llama("gqa", vocab_size=600), tmp_path / name / "model.onnx")
        words = {f"w{index}" if index >= different else f"<{index}>": index for index in range(600)}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w100")).save(str(tmp_path / name / "tokenizer.json"))
    check_same_tokens(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ModelError, match=r"9 of 600 tokens .*: token 0 is '<0>', expected 'w0'; use a draft model of"):
        check_same_tokens(tmp_path / "a", tmp_path / "c")


def test_a_draft_model_is_converted_and_used(folder, prepared, monkeypatch):
    monkeypatch.setattr("ortolan.server.run.default_cache_dir", lambda: prepared.parent.parent)
    found = []
    for options in ([], ["--draft-model", folder]):
        result = invoke("generate", prepared, "hello", *LIMITS[:-4], "--max-tokens", 60, "--temperature", 0, *options)
        assert result.exit_code == 0, result.output
        found.append(result.stdout)
    assert found[0] == found[1]
    with open_engine(prepared, replace(SMALL, draft_model=prepared)) as (engine, _):
        source = engine._speculation._model
        assert source.model.blocks == engine.model.blocks
        stream = engine.submit(Request((1, 2, 3), 60, SamplingOptions(temperature=0)))
        assert sum(len(output.tokens) for output in stream) == 60
        assert source._calls > 1


@pytest.mark.parametrize("command", [("serve", "m.gguf"), ("chat", "m.gguf"), ("generate", "m.gguf", "hi")])
def test_unknown_types_of_the_cache(command):
    refused = invoke(*command, "--cache-type", "int4")
    assert refused.exit_code == 2
    assert all(part in refused.stderr for part in ("--cache-type", "int4", "bfloat16", "int8"))
    assert tuple(CacheTypes) == get_args(CacheType)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", 2.1), ("--temperature", -1), ("--top-p", 0), ("--top-p", 7), ("--top-p", "nan")],
)
def test_limits_of_sampling(option, value):
    """The server has the same."""
    refused = invoke("generate", "missing.gguf", "hi", option, value)
    assert refused.exit_code == 2 and option in refused.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("--speculate", "x"), ("--cache-type", "x"), ("--threads", "x"), ("--threads", 0)]
)
def test_errors_of_options_are_plain(option, value):
    refused = invoke("generate", "missing.gguf", "hi", option, value)
    assert refused.exit_code == 2 and option in refused.stderr
    assert not any(words in refused.stderr for words in ("Value error", "Input should", "unable to parse"))


@pytest.mark.parametrize("name", ["folder", "prepared", "GGUF"])
def test_the_context_of_a_folder_is_checked_before_it_is_opened(name, request, tmp_path, monkeypatch):
    if name == "GGUF":  # converted before
        monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
        model = tmp_path / "m.gguf"
        write_gguf(model, CONFIGS["llama"])
        serving_folder(model, tmp_path / "cache")
        monkeypatch.setattr("ortolan.models.gguf.model.read_model", None)
    else:
        model = request.getfixturevalue(name)
    monkeypatch.setattr("ortolan.server.run.prepare_model", None)
    found = invoke("generate", model, "hi", "--context", 10**6)
    assert found.exit_code == 1 and "context is 1000000, expected 1 to the model's " in found.output


@pytest.mark.parametrize("cache_type", get_args(CacheType))
def test_sizes_are_checked_as_when_the_model_is_opened(cache_type, tmp_path, monkeypatch):
    """The same error before the conversion and after it, and no error if there is exactly enough memory."""
    source = tmp_path / "m.gguf"
    write_gguf(source, CONFIGS["qwen3"])
    converted = serving_folder(source, tmp_path / "cache")
    options = ServeOptions(threads=1, cache_type=cache_type)
    with open_engine(converted, options) as (engine, _):
        block, limit = engine.model.block_bytes, engine.model.limit
    blocks = -(-limit // 16)
    for memory, cache in ((1 << 34, blocks * block), (blocks * block * 4, None)):
        monkeypatch.setattr("ortolan.server.start_checks.usable_memory", lambda memory=memory: memory)
        monkeypatch.setattr("ortolan.engine.model.usable_memory", lambda memory=memory: memory)
        enough = replace(options, context=limit, cache_bytes=cache)
        check_engine_options(source, enough)
        with open_engine(converted, enough):
            pass
        monkeypatch.setattr("ortolan.server.start_checks.usable_memory", lambda memory=memory: memory - 4)
        monkeypatch.setattr("ortolan.engine.model.usable_memory", lambda memory=memory: memory - 4)
        short = replace(enough, cache_bytes=None if cache is None else cache - 1)
        with pytest.raises(ArgumentError, match="--cache-memory") as early:
            check_engine_options(source, short)
        with pytest.raises(ArgumentError, match="--cache-memory") as late, open_engine(converted, short):
            pass
        assert str(early.value).partition(";")[0] == str(late.value).partition(";")[0]


def test_a_decoder_is_not_an_encoder(folder):
    with pytest.raises(OrtolanError, match="is a decoder, expected an embedding model or a reranker for --encoder"):
        serve(folder, ServeOptions(port=0, encoder=folder))


def test_a_chat_template_of_your_own(prepared, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{% if tools %}[TOOL_CALLS]{% endif %}{{ messages[0].content }}")
    with open_engine(prepared, ServeOptions(**{**vars(SMALL), "chat_template": own})) as (_, read):
        assert read.template.render([{"role": "user", "content": "hi"}]) == "hi"
        assert read.tool_family == "mistral"
    plain, mine = (invoke("generate", prepared, "hello", *LIMITS, *more) for more in ((), ("--chat-template", own)))
    assert (plain.exit_code, mine.exit_code) == (0, 0)
    assert plain.stdout != mine.stdout


def test_an_encoder_has_no_chat_template(tmp_path):
    write_wordpiece(tmp_path / "tokenizer.json")
    write_reranker(tmp_path, vocab_size=256)
    options = ServeOptions(chat_template=tmp_path / "own.jinja")
    with pytest.raises(OrtolanError, match="remove --chat-template"), open_application(tmp_path, options):
        pass


def test_sizes():
    assert [read_bytes(text) for text in (None, "512M", "2g", "1.5GiB", "4096", "1KB")] == [
        None, 2**29, 2**31, 3 * 2**29, 4096, 1024
    ]  # fmt: skip
    for bad in ("", "x", "G", "-1M", "nan", "inf", "1e30"):
        assert invoke("generate", "folder", "x", "--cache-memory", bad).exit_code == 2


def test_lines_at_the_start(folder, tmp_path, monkeypatch):
    """A conversion, and a cache that is too small for the model's context."""
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path))
    said = []
    converted = prepare_model(folder, say=said.append)
    assert prepare_model(folder, say=said.append) == converted
    assert said == ["converting small to the form for serving (once)"]
    with open_engine(converted, ServeOptions(threads=1), said.append) as (engine, _):
        block, limit = engine.model.block_bytes, engine.model.limit
    assert len(said) == 1
    with open_engine(converted, ServeOptions(threads=1, cache_bytes=2 * block), said.append):
        assert said[1:] == [f"context is 32 of the model's {limit} tokens, because of --cache-memory"]
    with (
        pytest.raises(ArgumentError, match="--cache-memory"),
        open_engine(converted, ServeOptions(cache_bytes=block - 1)),
    ):
        pass


def test_the_engine_is_closed_at_the_end(prepared):
    with open_engine(prepared, SMALL) as (engine, folder):
        list(complete(engine, folder, "a", AnswerOptions(2, temperature=0.0)))
    with pytest.raises(OrtolanError, match="closed"):
        list(complete(engine, folder, "a", AnswerOptions(2)))
