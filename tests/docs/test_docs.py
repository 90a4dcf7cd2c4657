"""What the pages tell readers to type works: their Python and bash blocks run, in a folder with a small encoder."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import ortolan
from ortolan.models import tiny

from ..text.wordpiece_file import write_wordpiece
from .pages import ROOT, blocks, run_bash


def run_page(page: str, folder: Path) -> dict[str, object]:
    """Runs the page from top to bottom; returns the names that its Python made."""
    names: dict[str, object] = {}
    for language, code in blocks(page):
        if language == "bash":
            run_bash(code, folder)
        elif language == "python":
            exec(compile(code, page, "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """model.onnx, its tokenizer.json, and fast.onnx, the optimized model."""
    write_wordpiece(tmp_path / "tokenizer.json")
    ir.save(tiny.tiny_bert(vocab_size=256, max_position_embeddings=128), tmp_path / "model.onnx")
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "fast.onnx", options={"sparsity": 0.3})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_text(folder):
    pytest.importorskip("onnxruntime_extensions")
    names = run_page("text.md", folder)
    assert names["vectors"].shape[0] == 2
    assert np.allclose(np.linalg.norm(names["vectors"], axis=1), 1, atol=1e-5)


def test_triton(folder):
    run_page("triton.md", folder)
    assert (folder / "models" / "fast" / "config.pbtxt").is_file()


def test_serving(folder):
    pytest.importorskip("onnxruntime_extensions")
    names = run_page("serving.md", folder)
    assert len(names["sessions"]) == 2


def ort_headers() -> Path | None:
    """Where a build of these sources, or the system, has ONNX Runtime's headers."""
    found = [*ROOT.glob("build/**/onnxruntime_cxx_api.h"), *Path("/usr/include").glob("**/onnxruntime_cxx_api.h")]
    return found[0].parent if found else None


def test_cpp(folder):
    import onnxruntime

    headers = ort_headers()
    if headers is None or shutil.which("g++") is None:
        pytest.skip("no headers of ONNX Runtime, or no g++")
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
