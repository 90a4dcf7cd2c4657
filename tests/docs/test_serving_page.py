"""The commands and requests in docs/serving.md and serve-chat.md run, some of them on a Ray cluster of the test."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import onnx_ir as ir
import pytest

from ortolan import TextInput
from ortolan.benchmarks.serving import free_port
from ortolan.graph_passes.text.text_input import add_text_input, plan_text_input
from ortolan.models import tiny
from ortolan.server.conversion import model_kind

from ..models.gguf_file import CONFIGS
from ..models.gguf_file import write as write_gguf
from ..text.reranker import write_reranker
from ..text.wordpiece_file import write_wordpiece
from .pages import blocks, run_bash

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("onnxruntime_extensions")

SECONDS = 300  # time limit for a server's answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the models of the pages: encoders, whose input is text or tokens, and decoders."""
    found = tmp_path_factory.mktemp("models")
    tokenizer = write_wordpiece(found / "tokenizer.json")
    encoder = tiny.tiny_bert(vocab_size=256)
    add_text_input(encoder, plan_text_input(encoder, TextInput(tokenizer, max_tokens=16)))
    ir.save(encoder, found / "fast.onnx")
    write_reranker(found / "reranker", vocab_size=256)
    write_wordpiece(found / "reranker/tokenizer.json")
    write_gguf(found / "small.gguf", CONFIGS["llama"])
    shutil.copyfile(found / "small.gguf", found / "model.gguf")
    (found / "model_folder").mkdir()
    shutil.copyfile(found / "tokenizer.json", found / "model_folder/tokenizer.json")
    ir.save(tiny.tiny_llama(hidden_size=64, vocab_size=256), found / "model_folder/model.onnx")
    return found


@pytest.fixture(scope="module")
def cluster(folder):
    """Start a cluster, and return its address and its proxy's port."""
    ray = pytest.importorskip("ray")
    from ..serving.ray_cluster import ray_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTOLAN_CACHE", str(folder))  # of the replicas, which inherit it
        with ray_cluster() as port:
            yield ray.get_runtime_context().gcs_address, port


def curl(command: str, port: int, expected: str) -> None:
    """Send the request until the answer matches `expected`, in which … matches any text."""
    pattern = ".*".join(map(re.escape, expected.split("…")))
    end = time.monotonic() + SECONDS
    while True:
        done = subprocess.run(
            ["bash", "-c", command.replace(":8000", f":{port}")], capture_output=True, text=True, check=False
        )
        if re.fullmatch(pattern, done.stdout, re.DOTALL):
            return
        assert time.monotonic() < end, f"{command}\n{done.stdout}"
        time.sleep(0.5)


class Server:
    """Runs a server command until the block ends.

    The command is killed, so its application keeps running until the next command replaces it.
    """

    def __init__(self, command: str, folder: Path, address: str = "") -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "RAY_ADDRESS": address, "ORTOLAN_CACHE": str(folder)}
        self.log = (folder / "server.log").open("w")
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=self.log, stderr=subprocess.STDOUT
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def console(page: str) -> list[str]:
    """Return the console blocks of a page: the command of a server, then a request and its answer."""
    return [code.replace("\\\n", "") for language, code in blocks(page) if language == "console"]


CONSOLE = console("serving.md")
ONE_PROCESS = [code for code in CONSOLE if code.startswith("ortolan serve")]
ON_RAY = [code for code in CONSOLE if code not in ONE_PROCESS]


@pytest.mark.parametrize("code", ONE_PROCESS, ids=[code.split("\n")[0][:40] for code in ONE_PROCESS])
def test_console(code, folder):
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    server, request = code.splitlines()
    command, expected = request.split("  # ")
    port = free_port()
    with Server(f"{server} --port {port} --threads 1", folder):
        curl(command, port, expected)


def test_the_page_about_chats(folder, monkeypatch, capsys):
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    pytest.importorskip("openai")
    (code,) = console("serve-chat.md")
    server, request = code.splitlines()
    command, expected = request.split("  # ")
    port = free_port()
    with Server(f"{server} --port {port} --threads 1", folder):
        curl(command, port, expected)
        ((_, client),) = [block for block in blocks("serve-chat.md") if block[0] == "python"]
        exec(compile(client.replace(":8000", f":{port}"), "serve-chat.md", "exec"), {})
    assert capsys.readouterr().out.strip()
    monkeypatch.setenv("ORTOLAN_CACHE", str(folder))
    for language, lines in blocks("serve-chat.md"):
        if language == "bash":
            run_bash(lines, folder)
    assert model_kind(folder / "serving") == "serving"


@pytest.mark.parametrize("code", ON_RAY, ids=[code.split("\n")[0][:40] for code in ON_RAY])
def test_console_of_ray(code, cluster, folder):
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    address, port = cluster
    server, request = code.replace("/models/", f"{folder}/").splitlines()
    command, expected = request.split("  # ")
    with Server(server, folder, address):
        curl(command, port, expected)


def test_the_file_of_applications(cluster, folder):
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    address, port = cluster
    ((_, code),) = [block for block in blocks("serving.md") if block[0] == "yaml"]
    (folder / "serve.yaml").write_text(code.replace("/models/", f"{folder}/"))
    with Server("serve run serve.yaml", folder, address):
        for prefix, model in (("", "fast"), ("/llm", "small")):
            curl(
                shlex.join(["curl", f"http://127.0.0.1:8000{prefix}/health"]),
                port,
                f'{{"status":"ok","model":"{model}",…}}',
            )
