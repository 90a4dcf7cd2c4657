"""Published models through the hooks, end to end.

Each takes minutes and is skipped if the model is not in the cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ortolan.benchmarks.hooks import RUNS
from ortolan.cache_folder import default_cache_dir
from ortolan.models.manifest import find_entry

pytestmark = pytest.mark.network


def needs(model: str, *modules: str) -> None:
    for module in (*modules, "gguf", "safetensors", "torch", "transformers"):
        pytest.importorskip(module)
    if not (default_cache_dir() / f"{model}-{find_entry(model).digest}").is_dir():
        pytest.skip(f"{model} is not in the cache; ortolan.models.get_model({model!r}) fetches it")


def test_optimum_and_all_minilm(tmp_path: Path) -> None:
    needs("all-minilm-l6-v2", "optimum.onnxruntime")
    original, bf16, int8 = RUNS["optimum-encoder"](tmp_path, 0, 2)
    assert bf16.same > 0.9999 and int8.same > 0.99
    assert int8.megabytes < bf16.megabytes < original.megabytes


def test_optimum_and_smollm2(tmp_path: Path) -> None:
    needs("smollm2-135m-instruct", "optimum.onnxruntime")
    original, exact, int4 = RUNS["optimum-decoder"](tmp_path, 32, 2)
    assert (original.same, exact.same) == (1, 1)
    assert int4.megabytes < 0.5 * exact.megabytes


def test_genai_and_smollm2(tmp_path: Path) -> None:
    needs("smollm2-135m-instruct", "onnxruntime_genai")
    original, exact, built, adopted = RUNS["genai"](tmp_path, 32, 2)
    assert (original.same, exact.same, built.same) == (1, 1, 1)
    # The models sum in a different order, so an int8 activation may round differently and change later tokens.
    assert adopted.same > 0.2
