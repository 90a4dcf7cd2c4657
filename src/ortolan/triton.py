"""A model repository for NVIDIA's Triton Inference Server, whose backend is a stock ONNX Runtime."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortolan.graph_passes.files.model_file import load_model
from ortolan.graph_passes.files.model_folder import move_folder_into_place
from ortolan.graph_passes.measure.feeds import model_inputs
from ortolan.graph_passes.text.nodes import EXTENSIONS_DOMAIN

from .errors import ModelError, OutputError, listing
from .library import LIBRARY_NAME, get_library_path

_VERSION = "1"
_MODEL = "model.onnx"  # the name under which Triton looks for it
_TYPES = {
    ir.DataType.BOOL: "TYPE_BOOL",
    ir.DataType.UINT8: "TYPE_UINT8",
    ir.DataType.UINT16: "TYPE_UINT16",
    ir.DataType.UINT32: "TYPE_UINT32",
    ir.DataType.UINT64: "TYPE_UINT64",
    ir.DataType.INT8: "TYPE_INT8",
    ir.DataType.INT16: "TYPE_INT16",
    ir.DataType.INT32: "TYPE_INT32",
    ir.DataType.INT64: "TYPE_INT64",
    ir.DataType.FLOAT16: "TYPE_FP16",
    ir.DataType.FLOAT: "TYPE_FP32",
    ir.DataType.DOUBLE: "TYPE_FP64",
    ir.DataType.STRING: "TYPE_STRING",
    ir.DataType.BFLOAT16: "TYPE_BF16",
}


def write_repository(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    name: str | None = None,
    max_batch_size: int = 8,
    instances: int = 1,
    threads: int | None = None,
    path_on_server: str | None = None,
    extensions: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes `output/name/`: config.pbtxt, and in 1/ the model, its external data and libortolan_ops.so.

    name: the model's; None: the file's name. Another model of that name in the repository is an error.
    max_batch_size: requests of equal shapes are joined to batches of up to so many, if all inputs and outputs begin
        with one batch dimension; others get 0, as Triton calls that.
    instances: copies of the model that run at the same time; they share the mapped weights of an external data file.
    threads: of ONNX Runtime for each instance; None: ONNX Runtime's choice.
    path_on_server: where the server finds the repository, as /models in a container; None: where it is written. The
        library is named by its full path: ONNX Runtime does not look for it beside the model.
    extensions: for a model with a tokenizer, a libortextensions.so that needs no Python; the one in the Python package
        does.

    Returns the model's folder, which appears complete or not at all. Raises ModelError and OutputError.
    """
    source = load_model(model)
    assert source.path is not None
    chosen = name or (source.folder.resolve().name if source.folder is not None else source.path.stem)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", chosen):
        raise OutputError(f"{chosen!r} cannot be the name of a model; give one of letters, digits, '_', '-' and '.'")
    if max_batch_size < 0 or instances < 1 or (threads is not None and threads < 1):
        raise OutputError(
            f"max_batch_size {max_batch_size}, instances {instances}, threads {threads}; expected at least 0, 1 and 1"
        )
    libraries = {LIBRARY_NAME: Path(get_library_path())}
    if EXTENSIONS_DOMAIN in source.model.graph.opset_imports:
        if extensions is None or not Path(extensions).is_file():
            raise ModelError(
                f"{source.name} has a tokenizer: give extensions (--extensions), the path of a libortextensions.so "
                "built for C++ hosts from onnxruntime-extensions' sources; the one in its Python package needs Python"
            )
        if Path(extensions).name == LIBRARY_NAME:
            raise OutputError(f"extensions is {str(extensions)!r}, which has the name of Ortolan's library; rename it")
        libraries[Path(extensions).name] = Path(extensions)
    repository = Path(output)
    folder = repository / chosen
    if folder.exists() or folder.is_symlink():
        raise OutputError(f"{str(folder)!r} is there; remove it, or give another name")
    if path_on_server is not None and not Path(path_on_server).is_absolute():
        raise OutputError(f"path_on_server is {str(path_on_server)!r}, expected a full path, from '/' on")
    place = Path(path_on_server or repository.absolute()) / chosen / _VERSION
    config = _config(source.model, chosen, max_batch_size, instances, threads, [str(place / one) for one in libraries])
    # Triton wants one name for all models; data files keep theirs, which the model holds.
    files = {_MODEL: source.path} | {
        str(file.relative_to(source.external_root)): file for file in source.data_files if source.external_root
    }
    clash = files.keys() & libraries.keys() | ({_MODEL} & {str(file.name) for file in source.data_files})
    if clash:
        raise ModelError(f"external data of {source.name} is called {listing(clash)}, which has another meaning here")
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{chosen}.ortolan-", dir=repository, ignore_cleanup_errors=True
        ) as work:
            written = Path(work) / chosen
            for target, file in (files | libraries).items():
                (written / _VERSION / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, written / _VERSION / target)
            (written / "config.pbtxt").write_text(config, encoding="utf-8")
            move_folder_into_place(written, folder)
    except OSError as error:
        raise OutputError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
    return folder


def _config(
    model: ir.Model, name: str, max_batch_size: int, instances: int, threads: int | None, libraries: Sequence[str]
) -> str:
    """config.pbtxt: a ModelConfig in protobuf's text format."""
    inputs, outputs = list(model_inputs(model)), list(model.graph.outputs)
    batch = max_batch_size if _has_batch(inputs, outputs) else 0
    lines = [f"name: {_quoted(name)}", 'backend: "onnxruntime"', f"max_batch_size: {batch}"]
    for kind, values in (("input", inputs), ("output", outputs)):
        lines += [f"{kind} {{\n{_tensor(value, batch > 0)}\n}}" for value in values]
    if batch:
        lines.append("dynamic_batching {\n}")
    lines.append(f"instance_group {{\n  count: {instances}\n  kind: KIND_CPU\n}}")
    if threads is not None:
        lines.append(_parameter("intra_op_thread_count", str(threads)))
    paths = "\n".join(f"  op_library_filename: {_quoted(path)}" for path in libraries)
    lines.append(f"model_operations {{\n{paths}\n}}")
    return "\n".join(lines) + "\n"


def _has_batch(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> bool:
    """Whether all of them begin with one and the same dimension that is left open."""
    first = {_first_dimension(value) for value in (*inputs, *outputs)}
    return len(first) == 1 and first != {None}


def _first_dimension(value: ir.Value) -> str | None:
    if value.shape is None or len(value.shape) == 0:
        return None
    dimension = value.shape[0]
    return dimension.value if isinstance(dimension, ir.SymbolicDim) else None


def _tensor(value: ir.Value, batched: bool) -> str:
    if value.dtype not in _TYPES:
        raise ModelError(
            f"{value.name!r} is of type {value.dtype}, expected one that Triton knows: {listing(_TYPES.values())}"
        )
    if value.shape is None:
        raise ModelError(
            f"{value.name!r} has no shape, and Triton must know how many dimensions it has; export it again"
        )
    dims = [size if isinstance(size, int) else -1 for size in value.shape][int(batched) :]
    reshape = ""
    if not dims:  # Triton has no scalars: a request gives one number, the model gets none of its dimension
        dims, reshape = [1], "\n  reshape {\n  }"
    return (
        f"  name: {_quoted(value.name or '')}\n  data_type: {_TYPES[value.dtype]}\n"
        f"  dims: [ {', '.join(map(str, dims))} ]{reshape}"
    )


def _parameter(key: str, value: str) -> str:
    return f"parameters {{\n  key: {_quoted(key)}\n  value {{\n    string_value: {_quoted(value)}\n  }}\n}}"


def _quoted(text: Any) -> str:
    """As in protobuf's text format."""
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in str(text).encode()
    )
    return f'"{escaped}"'
