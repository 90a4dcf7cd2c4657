"""The Python and bash blocks of the docs run in a folder with small models."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import ortolan
from ortolan.benchmarks.matmul_nbits import make_matmul_nbits
from ortolan.cli import app
from ortolan.models import tiny
from ortolan.models.sparseml_form import quantized_form

from ..provider.sessions import needs_provider
from ..text.late_folders import write_colbert, write_splade
from ..text.reranker import write_judge, write_reranker
from ..text.wordpiece_file import write_wordpiece
from .other_packages import NEEDS as OTHER_PACKAGES
from .pages import ROOT, blocks, pages, run_bash, run_python

# Pages whose blocks run unchanged, and the modules that they need.
PAGES: dict[str, tuple[str, ...]] = {
    "README.md": (),
    "auto.md": ("tokenizers",),
    "calibration.md": ("tokenizers",),
    "cpus.md": (),
    "decoders.md": ("tokenizers",),
    "deepsparse.md": (),
    "formats.md": ("tokenizers",),
    "gguf.md": ("gguf", "tokenizers"),
    "install.md": (),
    "long-context.md": ("tokenizers",),
    "opencl.md": (),
    "padding.md": (),
    "quickstart.md": ("tokenizers",),
    "recipes.md": (),
    "serving.md": ("onnxruntime_extensions",),
    "sparse-training.md": ("tokenizers", "torch"),
}
WITH_TESTS_OF_THEIR_OWN = (
    "cpp.md",
    "deploy.md",
    "embedding.md",
    "provider.md",
    "quantized-models.md",
    "serve-chat.md",
    "text.md",
)
KINDS = {"bash", "python", "sh", "console", "text", "c", "cpp", "csharp", "yaml"}
WORDS = ("the", "cat", "sleeping", "unaffable", "a", "b", "c", "0", "1", "2", ",", ".", "!")


def run_page(page: str, folder: Path) -> dict[str, object]:
    """Run all blocks of the page in order; return the names that its Python blocks defined."""
    names: dict[str, object] = {"__name__": page}
    for language, code in blocks(page):
        if language == "bash":
            for line in code.replace("\\\n", "").splitlines():
                run_line(line, folder)
        elif language == "python":
            exec(compile(code, page, "exec"), names)
    return names


def run_line(line: str, folder: Path) -> None:
    """Run a line of bash. Commands of Ortolan run in this process, where timing is shortened."""
    words = shlex.split(line, comments=True)
    if not words or words[0] != "ortolan":
        run_bash(line, folder)
        return
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, f"{line}\n{result.output}"


def blocks_of_five(array: np.ndarray) -> np.ndarray:
    """Return a mask that keeps about one of five blocks; a block has one input and four outputs."""
    mask = np.random.default_rng(0).random((array.shape[0], -(-array.shape[1] // 4))) < 0.2
    return np.repeat(mask, 4, axis=1)[:, : array.shape[1]]


def two_of_four(array: np.ndarray) -> np.ndarray:
    """Return a mask that keeps the first and last of each four inputs."""
    return (np.isin(np.arange(len(array)) % 4, (0, 3)))[:, None]


def write_sparse(model: ir.Model, path: Path, keep: Callable[[np.ndarray], np.ndarray]) -> None:
    """Save the model with the linear weights [k, n] multiplied by the mask that `keep` returns."""
    proto = ir.to_proto(model)
    for tensor in proto.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.ndim == 2 and not {"embeddings", "pooler"} & set(tensor.name.split(".")):
            kept = (array * keep(array)).astype(array.dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(kept, tensor.name))
    onnx.save(proto, path)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Write the files that the pages name.

    Encoders: model.onnx, and made from it fast.onnx, sparse.onnx, 2of4.onnx and qat.onnx. Others: decoder.onnx,
    tokenizer.json for all models, texts.txt, the folders model_folder (4-bit weights) and genai_folder, and model.gguf
    if the package gguf is installed.
    """
    folder = tmp_path_factory.mktemp("models")
    write_wordpiece(folder / "tokenizer.json")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(5, 14))) for _ in range(150)]
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 8000, "max_position_embeddings": 128}
    encoder = tiny.tiny_bert(**sizes)
    ir.save(encoder, folder / "model.onnx")
    write_sparse(encoder, folder / "sparse.onnx", blocks_of_five)
    write_sparse(encoder, folder / "2of4.onnx", two_of_four)
    ids = rng.integers(10, 8000, (4, 16))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    onnx.save(quantized_form(onnx.load(folder / "sparse.onnx"), [feeds]), folder / "qat.onnx")
    ortolan.optimize_onnx(folder / "model.onnx", folder / "fast.onnx", weights="int8")
    ir.save(tiny.tiny_llama(hidden_size=64, vocab_size=128), folder / "decoder.onnx")
    for name in ("model_folder", "genai_folder"):
        (folder / name).mkdir()
        shutil.copyfile(folder / "tokenizer.json", folder / name / "tokenizer.json")
    make_matmul_nbits(folder / "decoder.onnx", folder / "model_folder" / "model.onnx", 32, 4)
    ir.save(tiny.tiny_llama(attention="gqa", head_dim=16, vocab_size=128), folder / "genai_folder" / "model.onnx")
    part = {"filename": "model.onnx", "head_size": 16, "session_options": {"provider_options": []}}
    config = {"model": {"type": "llama", "context_length": 64, "decoder": part, "vocab_size": 128}}
    (folder / "genai_folder" / "genai_config.json").write_text(json.dumps(config))
    if importlib.util.find_spec("gguf") is not None:
        from ..models.gguf_file import write

        write(folder / "model.gguf")
    return folder


@pytest.fixture
def folder(models, tmp_path, monkeypatch) -> Path:
    """Copy the models to a new folder with an empty cache of layer times."""
    folder = tmp_path / "work"
    shutil.copytree(models, folder)
    monkeypatch.setenv("ORTOLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    return folder


def test_every_page_with_code_is_run():
    with_code = {page for page in pages() if {"bash", "python"} & {language for language, _ in blocks(page)}}
    assert with_code == {*PAGES, *OTHER_PACKAGES, *WITH_TESTS_OF_THEIR_OWN}


def test_blocks_that_do_not_run_are_of_known_kinds():
    for page in pages():
        assert {language for language, _ in blocks(page)} <= KINDS
        for language, code in blocks(page):
            if language == "sh":
                lines = [line for line in code.splitlines() if line]
                assert all(line.startswith(("pip install", "make wheel")) for line in lines), code


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page, folder):
    for module in PAGES[page]:
        pytest.importorskip(module, reason=f"docs/{page} needs {module}, and was not run")
    run_page(page, folder)


def test_quantized_and_sparse_models_become_our_operators(folder):
    run_page("quantized-models.md", folder)
    nodes = [node.op_type for node in onnx.load(folder / "fast.onnx").graph.node]
    assert "VNNISpMM" in nodes
    assert "W4A8MatMul" in [
        node.op_type for node in onnx.load(folder / "model_folder.ortolan" / "model.onnx").graph.node
    ]
    for kind in ("bf16", "int8", "int4"):
        formats = [layer.weight_format for layer in ortolan.inspect_onnx(folder / f"{kind}.onnx").linears]
        assert sum((found or "").startswith(f"2:4 {kind}") for found in formats) >= 8


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_vectors_of_texts_have_length_1(folder):
    pytest.importorskip("onnxruntime_extensions")
    names = run_page("text.md", folder)
    assert names["vectors"].shape[0] == 2
    assert np.allclose(np.linalg.norm(names["vectors"], axis=1), 1, atol=1e-5)


def write_sentence_files(folder: Path) -> None:
    """Write the files of a sentence-transformers folder, with the prompts of embedding.md."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (prompts,) = [code for language, code in blocks("embedding.md") if language == "text"]
    (folder / "config_sentence_transformers.json").write_text(prompts)


def test_vectors_and_ranked_texts(folder):
    for name in ("model", "reranker"):
        (folder / name).mkdir()
        shutil.copyfile(folder / "tokenizer.json", folder / name / "tokenizer.json")
        (folder / name / "config.json").write_text('{"max_position_embeddings": 64}')
    shutil.copyfile(folder / "model.onnx", folder / "model" / "model.onnx")
    write_sentence_files(folder / "model")
    write_reranker(folder / "reranker")
    write_judge(folder / "qwen3-reranker")
    write_colbert(folder / "colbert")
    write_splade(folder / "splade")
    names = run_page("embedding.md", folder)
    found = ortolan.rerank("how do cats sleep?", names["texts"], folder / "colbert")
    np.testing.assert_allclose([one.score for one in found], sorted(names["scores"], reverse=True), rtol=1e-5)
    assert len(names["indices"]) == len(names["values"]) <= 64
    assert names["ranked"].index in (0, 1)
    assert len(ortolan.rerank("how do cats sleep?", names["texts"], "fast-judge")) == 2
    texts = ["passage: The cat sleeps.", "query: how do cats sleep?"]
    prompted = ortolan.embed(texts, "fast", settings=ortolan.TextInput(prompt_name=""))
    assert np.array_equal(np.concatenate([names["passages"], names["queries"]]), prompted)
    assert np.fromfile(folder / "vectors.f32", np.float32).reshape(-1, 128).shape == (150, 128)


def test_triton_finds_its_repository(folder):
    run_page("deploy.md", folder)
    assert (folder / "models" / "fast" / "config.pbtxt").is_file()


def ort_headers() -> Path | None:
    """Return the folder of ONNX Runtime's C++ headers: ORT_INCLUDE, or the system's."""
    folders = [Path(os.environ["ORT_INCLUDE"])] if "ORT_INCLUDE" in os.environ else []
    found = [path for folder in (*folders, Path("/usr/include")) for path in folder.glob("**/onnxruntime_cxx_api.h")]
    return found[0].parent if found else None


@needs_provider
def test_provider(folder):
    """Each block runs in a separate process, because a provider can be registered only once."""
    found = [code for language, code in blocks("provider.md") if language == "python"]
    assert len(found) == 6
    for code in found:
        run_python(code + "assert session.get_providers()[0] == 'OrtolanExecutionProvider'", folder)
    ((_, command),) = [block for block in blocks("provider.md") if block[0] == "bash"]
    run_bash(command, folder)


def test_cpp(folder):
    import onnxruntime

    headers = ort_headers()
    if headers is None or shutil.which("g++") is None:
        pytest.skip("no C++ headers of ONNX Runtime (set ORT_INCLUDE), or no g++")
    if not list(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")):
        pytest.skip("onnxruntime's package holds no libonnxruntime.so")
    ((_, source),) = [block for block in blocks("cpp.md") if block[0] == "cpp"]
    (folder / "host.cc").write_text(source)
    ((_, build),) = [block for block in blocks("cpp.md") if block[0] == "bash"]
    run_bash(build, folder, ORT_INCLUDE=str(headers))
    shape, numbers = (folder / "output.txt").read_text().splitlines()

    session = ortolan.create_session(folder / "fast.onnx")
    ids = np.array([[2, 3, 5, 7]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    expected = session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})[0]
    assert tuple(map(int, shape.split())) == expected.shape
    np.testing.assert_allclose(
        [float(part) for part in numbers.split()], expected.reshape(-1)[:4], rtol=1e-4, atol=1e-5
    )
