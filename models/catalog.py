"""Real models as ready ONNX files: fetched, built where no ONNX is published, and kept in the cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from ..errors import OrtolanError
from .bert import BertConfig, build_bert
from .fetch import Progress, fetch, working_folder
from .llama import build_llama, read_llama2c
from .manifest import ManifestError, ModelEntry, find_entry


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk. tokenizer is None where its package brings none; licence is an SPDX name."""

    name: str
    onnx: Path
    tokenizer: Path | None
    licence: str
    architecture: str


def _build_minilm(folder: Path) -> ir.Model:
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise OrtolanError(
            "building this model needs the package 'safetensors'; install it with: pip install 'ortolan[demo]'"
        ) from error
    config = BertConfig.from_json(folder / "config.json")
    return build_bert(load_file(folder / "model.safetensors"), config, name="all-minilm-l6-v2")


def _build_stories(folder: Path) -> ir.Model:
    config, weights = read_llama2c(folder / "stories15M.bin")
    return build_llama(weights, config, name="stories15m")


# How a model becomes ONNX: a builder, or the published file. The second item is the tokenizer's file.
_CATALOG: dict[str, tuple[Callable[[Path], ir.Model] | str, str | None]] = {
    "all-minilm-l6-v2": (_build_minilm, "tokenizer.json"),
    "paraphrase-minilm-l3-v2": ("paraphrase-minilm-l3-v2.onnx", None),
    "stories15m": (_build_stories, "tokenizer.bin"),
}


def list_models() -> list[str]:
    """The names that get_model knows."""
    return list(_CATALOG)


def get_model(
    name: str, cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> ModelFiles:
    """Fetches a model, builds its ONNX file where needed, and says where the files are. Later calls are instant.

    name: one of list_models().
    cache_dir: the cache folder; `$ORTOLAN_CACHE` or the platform's when None.
    progress: called with one line of text at each step.

    Raises ManifestError for an unknown name, FetchError when fetching fails, OrtolanError when a package is missing.
    """
    if name not in _CATALOG:
        raise ManifestError(f"no ONNX model {name!r}; known models: {', '.join(_CATALOG)}")
    entry = find_entry(name)
    source, tokenizer = _CATALOG[name]
    folder = fetch(name, cache_dir, progress)
    if isinstance(source, str):
        onnx = folder / source
    else:
        # The name holds a digest of the builders: after an upgrade the model is built anew.
        onnx = folder / f"{name}-{_builders_digest()}.onnx"
        if not onnx.is_file():
            if progress is not None:
                progress(f"{name}: building {onnx.name}")
            _save(source(folder), onnx, entry)
    return ModelFiles(name, onnx, folder / tokenizer if tokenizer else None, entry.licence, entry.architecture)


def _save(model: ir.Model, path: Path, entry: ModelEntry) -> None:
    model.metadata_props["source"] = ", ".join(f"{package.package} {package.version}" for package in entry.packages)
    model.metadata_props["licence"] = entry.licence
    with working_folder(path.parent.parent) as work:
        unfinished = work / path.name
        ir.save(model, unfinished)
        unfinished.replace(path)


def _builders_digest() -> str:
    folder = Path(__file__).parent
    sources = b"".join((folder / module).read_bytes() for module in ("graph_builder.py", "bert.py", "llama.py"))
    return hashlib.sha256(sources).hexdigest()[:8]
