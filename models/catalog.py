"""Real models as ONNX files: fetched, or built if no ONNX file is published, and cached."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import onnx_ir as ir

from ..errors import OrtolanError
from .bert import BertConfig, build_bert, build_bert_masked_lm
from .fetch import Progress, fetch, working_folder
from .gguf import read_gguf, read_gguf_tokenizer
from .llama import AttentionForm, build_llama
from .llama2c import read_llama2c
from .manifest import ManifestError, ModelEntry, find_entry
from .mpnet import MpnetConfig, build_mpnet

# Limit for weights inside the ONNX file, in bytes. Larger weights are stored beside the file, where ONNX Runtime maps
# them.
_MAX_EMBEDDED = 256 << 20


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk. tokenizer: the tokenizer's file, or None; licence: an SPDX name."""

    name: str
    onnx: Path
    tokenizer: Path | None
    licence: str
    architecture: str


@dataclass(frozen=True)
class _Source:
    """The origin of a model's ONNX file and tokenizer.

    Attributes:
        onnx: The name of the published ONNX file, or a function that builds the model from the folder of fetched files.
        decoder: For decoders, a function that builds the model from the folder and the kind of attention.
        tokenizer: The name of the tokenizer's file, or a function that writes it.
    """

    onnx: str | Callable[[Path], ir.Model] | None = None
    decoder: Callable[[Path, AttentionForm], ir.Model] | None = None
    tokenizer: str | Callable[[Path, Path], None] | None = None


def safetensors_numpy() -> ModuleType:
    """Return the module safetensors.numpy."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise OrtolanError(
            "building this model needs the package 'safetensors'; install it with: pip install safetensors tokenizers"
        ) from error
    return safetensors.numpy


def _build_minilm(folder: Path) -> ir.Model:
    weights = safetensors_numpy().load_file(folder / "model.safetensors")
    return build_bert(weights, BertConfig.from_json(folder / "config.json"), name="all-minilm-l6-v2")


SPLADE = "splade-tiny"


def _build_splade(folder: Path) -> ir.Model:
    weights = safetensors_numpy().load_file(folder / "model.safetensors")
    # The file names the weights of norms like the first release of BERT.
    renamed = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): weight
        for name, weight in weights.items()
    }
    return build_bert_masked_lm(renamed, BertConfig.from_json(folder / "config.json"), name=SPLADE)


MPNET = "all-mpnet-base-v2"
MPNET_ZIP = f"{MPNET}.zip"


def _build_mpnet(folder: Path) -> ir.Model:
    load_file = safetensors_numpy().load_file
    with zipfile.ZipFile(folder / MPNET_ZIP) as archive, working_folder(folder.parent) as files:
        config, weights = (archive.extract(f"{MPNET}/{name}", files) for name in ("config.json", "model.safetensors"))
        return build_mpnet(load_file(weights), MpnetConfig.from_json(config), name=MPNET)


def _write_mpnet_tokenizer(folder: Path, path: Path) -> None:
    with zipfile.ZipFile(folder / MPNET_ZIP) as archive:
        path.write_bytes(archive.read(f"{MPNET}/tokenizer.json"))


def _build_stories(folder: Path, attention: AttentionForm) -> ir.Model:
    config, weights = read_llama2c(folder / "stories15M.bin")
    return build_llama(weights, config, "stories15m", attention)


_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _build_smollm2(folder: Path, attention: AttentionForm) -> ir.Model:
    config, weights = read_gguf(folder / _SMOLLM2)
    return build_llama(weights, config, "smollm2-135m-instruct", attention)


def _write_smollm2_tokenizer(folder: Path, path: Path) -> None:
    read_gguf_tokenizer(folder / _SMOLLM2).save(str(path))


_CATALOG: dict[str, _Source] = {
    "all-minilm-l6-v2": _Source(_build_minilm, tokenizer="tokenizer.json"),
    MPNET: _Source(_build_mpnet, tokenizer=_write_mpnet_tokenizer),
    "paraphrase-minilm-l3-v2": _Source("paraphrase-minilm-l3-v2.onnx"),
    SPLADE: _Source(_build_splade, tokenizer="tokenizer.json"),
    "stories15m": _Source(decoder=_build_stories, tokenizer="tokenizer.bin"),
    "smollm2-135m-instruct": _Source(decoder=_build_smollm2, tokenizer=_write_smollm2_tokenizer),
}


def list_models() -> list[str]:
    """Return the names that get_model accepts."""
    return list(_CATALOG)


def get_model(
    name: str,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    attention: AttentionForm = "standard",
) -> ModelFiles:
    """Fetch a model, build its ONNX file if needed, and return its files. Later calls use the cache.

    Args:
        name: One of list_models().
        cache_dir: The cache folder; None: `$ORTOLAN_CACHE` or the platform's default.
        progress: Called with one line of text at each step.
        attention: For decoders, see build_llama.

    Raises:
        ManifestError: The name is unknown, or the model does not support this kind of attention.
        FetchError: Fetching fails.
        OrtolanError: A package is missing.
    """
    if name not in _CATALOG:
        raise ManifestError(f"no ONNX model {name!r}; known models: {', '.join(_CATALOG)}")
    entry = find_entry(name)
    source = _CATALOG[name]
    if attention != "standard" and source.decoder is None:
        decoders = ", ".join(known for known, other in _CATALOG.items() if other.decoder)
        raise ManifestError(f"{name!r} does not support attention={attention!r}; these models do: {decoders}")
    folder = fetch(name, cache_dir, progress)
    # File names contain a digest of the builders' code, so that an upgrade rebuilds the files.
    digest = _builders_digest()

    def make(file: Path, write: Callable[[Path], None]) -> Path:
        if not file.is_file():
            if progress is not None:
                progress(f"{name}: building {file.name}")
            _make_file(file, write)
        return file

    if isinstance(source.onnx, str):
        onnx = folder / source.onnx
    else:
        suffix = "" if attention == "standard" else f"-{attention}"
        onnx = make(
            folder / f"{name}{suffix}-{digest}.onnx", lambda path: _save(source, folder, attention, path, entry)
        )
    tokenizer = source.tokenizer
    if isinstance(tokenizer, str):
        tokenizer_path = folder / tokenizer
    elif tokenizer is not None:
        tokenizer_path = make(folder / f"tokenizer-{digest}.json", partial(tokenizer, folder))
    else:
        tokenizer_path = None
    return ModelFiles(name, onnx, tokenizer_path, entry.licence, entry.architecture)


def _make_file(file: Path, write: Callable[[Path], None]) -> None:
    """Let `write` write the file and the files beside it to a temporary folder, then move all of them into place."""
    with working_folder(file.parent.parent) as work:
        write(work / file.name)
        # `file` is moved last, because its presence means that all other files are complete.
        for made in sorted(work.iterdir(), key=lambda path: path.name == file.name):
            made.replace(file.parent / made.name)


def _save(source: _Source, folder: Path, attention: AttentionForm, path: Path, entry: ModelEntry) -> None:
    if source.decoder is not None:
        model = source.decoder(folder, attention)
    else:
        assert callable(source.onnx)
        model = source.onnx(folder)
    model.metadata_props["source"] = ", ".join(f"{package.package} {package.version}" for package in entry.packages)
    model.metadata_props["licence"] = entry.licence
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    ir.save(model, path, external_data=f"{path.name}.data" if weights > _MAX_EMBEDDED else None)


def _builders_digest() -> str:
    folder = Path(__file__).parent
    modules = (
        *("graph_builder.py", "encoder.py", "bert.py", "mpnet.py"),
        *("llama.py", "llama_config.py", "llama_graph.py", "llama_gqa.py", "llama2c.py"),
        *("gguf/header.py", "gguf/file.py", "gguf/model.py", "gguf/tokenizer.py"),
        *("gguf/architectures.py", "gguf/rotary.py"),
    )
    sources = b"".join((folder / module).read_bytes() for module in modules)
    return hashlib.sha256(sources).hexdigest()[:8]
