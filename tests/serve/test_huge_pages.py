"""Weights of the engine's models in huge pages, or mapped."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import huge_pages
from ortolan.engine.model import CacheType, PagedModel
from ortolan.errors import ModelError, SessionError
from ortolan.graph_passes.files.model_file import load_model
from ortolan.models import tiny

from ..passes.cached_llama import llama
from .paged import run

IDS = np.random.default_rng(0).integers(0, tiny.TINY_LLAMA.vocab_size, 20).tolist()
DATA = "weights.data"
needs_huge_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages on request"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model for serving whose weights are in another file."""
    folder = tmp_path_factory.mktemp("huge")
    onnx.save(llama("gqa"), folder / "original.onnx")
    made = folder / "one.onnx"
    ortolan.optimize_onnx(folder / "original.onnx", made, weights="int4", serve=True, allow_different=True)
    (folder / "model").mkdir()
    file = folder / "model" / "model.onnx"
    onnx.save(onnx.load(made), file, save_as_external_data=True, location=DATA, size_threshold=256)
    return file


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that sets what the system says about huge pages."""
    file = tmp_path / "enabled"
    monkeypatch.setattr(huge_pages, "_SETTING", file)
    return file.write_text


def open_here(file: Path, cache_type: CacheType = "bfloat16", share_weights: bool = False) -> PagedModel:
    return PagedModel.open(file, threads=1, blocks=4, cache_type=cache_type, share_weights=share_weights)


def held(file: Path) -> list[str]:
    """Return the names of the weights that are read."""
    return [str(tensor.name) for tensor in huge_pages._weights(load_model(file).model)]


def size_of(file: Path) -> int:
    """Return the bytes of the memory for them."""
    return sum(-(-tensor.nbytes // 64) * 64 for tensor in huge_pages._weights(load_model(file).model))


@needs_huge_pages
@pytest.mark.parametrize("cache_type", get_args(CacheType))
def test_the_bits_are_those_of_mapped_weights(model: Path, cache_type: CacheType, setting) -> None:
    setting("always [madvise] never\n")
    models = [open_here(model, cache_type, share) for share in (False, True)]
    assert len(models[0]._weights) == 1 + len(held(model)) > 10 and not models[1]._weights
    gc.collect()
    found, expected = (run(one, (IDS, 0, [1, 3])) for one in models)
    assert found.tobytes() == expected.tobytes()


@needs_huge_pages
@pytest.mark.parametrize("cache_type", get_args(CacheType))
def test_the_session_uses_the_memory(model: Path, cache_type: CacheType, setting, monkeypatch) -> None:
    setting("[always] madvise never\n")
    expected = run(open_here(model, cache_type), (IDS, 0, [1, 3]))
    monkeypatch.setattr(huge_pages, "_read", lambda file, parts: None)  # all weights are zero
    assert run(open_here(model, cache_type), (IDS, 0, [1, 3])).tobytes() != expected.tobytes()


@needs_huge_pages
def test_at_most_half_of_the_free_memory_is_used(model: Path, setting, monkeypatch, caplog) -> None:
    setting("always [madvise] never\n")
    caplog.set_level("INFO", "ortolan")
    for free, is_read in ((2 * size_of(model), True), (2 * size_of(model) - 1, False)):
        monkeypatch.setattr(huge_pages, "free_memory", lambda free=free: free)
        caplog.clear()
        assert bool(open_here(model)._weights) == is_read
        assert ("weights stay mapped" in caplog.text) != is_read


def test_a_system_without_huge_pages_maps(model: Path, setting) -> None:
    assert not open_here(model)._weights  # no such file
    setting("always madvise [never]\n")
    assert not open_here(model)._weights


@needs_huge_pages
def test_only_weights_of_our_operators_are_read(tmp_path: Path) -> None:
    """ONNX Runtime's optimizers change weights of other operators in place; names in subgraphs may be the same."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy")
    weights = {
        name: np.arange(16, dtype=np.float32).reshape(4, 4) + i for i, name in enumerate(("own", "other", "both"))
    }
    inner = helper.make_graph(
        [helper.make_node("Identity", ["inner"], ["z"])],
        "inner",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [4, 4])],
        initializer=[numpy_helper.from_array(weights["own"] + 5, "inner")],
    )
    nodes = [
        helper.make_node("Scale", ["x", "own", "inner", "text"], ["a"], domain="ai.ortolan"),
        helper.make_node("Scale", ["a", "both"], ["b"], domain="ai.ortolan"),
        helper.make_node("Add", ["b", "both"], ["c"]),
        helper.make_node("Add", ["c", "other"], ["d"]),
        helper.make_node("If", ["yes"], ["e"], then_branch=inner, else_branch=inner),
        helper.make_node("Add", ["d", "e"], ["y"]),
    ]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    stored.append(numpy_helper.from_array(weights["own"], "inner"))
    stored.append(helper.make_tensor("text", TensorProto.COMPLEX64, [64], np.ones(64, np.complex64)))
    given = [x, helper.make_tensor_value_info("yes", TensorProto.BOOL, [])]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.ortolan", 1)]
    graph = helper.make_graph(nodes, "g", given, [y], initializer=stored)
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location=DATA, size_threshold=0)
    assert held(tmp_path / "m.onnx") == ["own"]


@needs_huge_pages
def test_weights_in_several_files_and_with_gaps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = {name: rng.standard_normal(size, np.float32) for name, size in (("a", 100), ("b", 7), ("c", 3000))}
    at = {"a": ("1", 64), "b": ("2", 0), "c": ("1", 1 << 16)}
    (tmp_path / "1").write_bytes(
        b"\xff" * 64 + parts["a"].tobytes() + b"\xff" * ((1 << 16) - 464) + parts["c"].tobytes()
    )
    (tmp_path / "2").write_bytes(parts["b"].tobytes())
    pairs = []
    for name, (file, offset) in at.items():
        size = parts[name].nbytes
        tensor = ir.ExternalTensor(
            file, offset, size, ir.DataType.FLOAT, shape=ir.Shape([size // 4]), name=name, base_dir=str(tmp_path)
        )
        pairs.append((tensor, np.zeros(size, np.uint8)))
    for file in ("1", "2"):
        huge_pages._read(tmp_path / file, [pair for pair in pairs if pair[0].location == file])
    for tensor, part in pairs:
        assert part.tobytes() == parts[str(tensor.name)].tobytes()
    (tmp_path / "2").write_bytes(b"short")
    with pytest.raises(EOFError, match=r"2$"):
        huge_pages._read(tmp_path / "2", pairs[1:2])
    with pytest.raises(FileNotFoundError, match="3"):
        huge_pages._read(tmp_path / "3", pairs[1:2])


@needs_huge_pages
@pytest.mark.parametrize("error", [OSError, EOFError])
def test_weights_that_cannot_be_read_are_mapped(model: Path, setting, monkeypatch, error: type[Exception]) -> None:
    setting("[always] madvise never\n")

    def fail(file: Path, parts: Any) -> None:
        raise error(file)

    expected = run(open_here(model), (IDS, 0, [1, 3]))
    monkeypatch.setattr(huge_pages, "_read", fail)
    mapped = open_here(model)
    assert not mapped._weights
    assert run(mapped, (IDS, 0, [1, 3])).tobytes() == expected.tobytes()


@needs_huge_pages
def test_onnx_runtime_says_what_is_wrong_with_a_model(tmp_path: Path, model: Path, setting) -> None:
    setting("[always] madvise never\n")
    file = tmp_path / "model.onnx"
    with pytest.raises(SessionError, match="does not exist"):
        open_here(file)
    file.write_bytes(model.read_bytes())
    with pytest.raises(SessionError, match=DATA):
        open_here(file)
    plain = tmp_path / "plain.onnx"
    onnx.save(llama("gqa"), plain, save_as_external_data=True, location="plain.data", size_threshold=256)
    with pytest.raises(ModelError, match="expected the form for serving"):
        open_here(plain)
    (tmp_path / DATA).hardlink_to(model.parent / DATA)  # load_model refuses such a file
    assert isinstance(open_here(file)._session, onnxruntime.InferenceSession)
