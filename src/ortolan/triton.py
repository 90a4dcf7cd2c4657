"""Model repositories for NVIDIA Triton Inference Server, which runs models in stock ONNX Runtime."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ortolan.graph_passes.files.model_file import load_model
from ortolan.graph_passes.files.output import move_folder_into_place
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.measure.feeds import model_inputs
from ortolan.graph_passes.text.nodes import EXTENSIONS_DOMAIN

from .errors import ArgumentError, ModelError, OutputError, listing
from .library import LIBRARY_NAME, get_library_path

_VERSION = "1"
_MODEL = "model.onnx"  # the name that Triton expects
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
    """Write `output/name/`: config.pbtxt, and in 1/ the model, its external data and Ortolan's library.

    The folder appears when it is complete.

    Args:
        model: The ONNX file or its folder.
        output: The model repository; created if it does not exist.
        name: The model's name. Default: the file's or the folder's name.
        max_batch_size: The largest number of requests of equal shapes in one batch. Models whose inputs and outputs do
            not all begin with one batch dimension get 0, which disables batching in Triton.
        instances: Copies of the model that run in parallel; they share the mapped weights of an external data file.
        threads: ONNX Runtime's intra-op threads of each instance. Default: ONNX Runtime's choice.
        path_on_server: The repository's path on the server, such as /models in a container. Default: `output`. The
            configuration names the library by its full path, because ONNX Runtime does not search beside the model.
        extensions: For a model with a tokenizer: a libortextensions.so built without Python, unlike the one in the
            Python package.

    Returns:
        The model's folder.

    Raises:
        ArgumentError: The name, a count or the path on the server is not allowed.
        ModelError: The model cannot be read, or has a type or shape that Triton does not support.
        OutputError: The folder exists, or cannot be written.
    """
    source = load_model(model)
    assert source.path is not None
    chosen = name or (source.folder.resolve().name if source.folder is not None else source.path.stem)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", chosen):
        raise ArgumentError(
            f"name is {chosen!r}, expected letters, digits, '_', '-' and '.', not starting with '-' or '.'; give "
            "another name"
        )
    if max_batch_size < 0 or instances < 1 or (threads is not None and threads < 1):
        raise ArgumentError(
            f"max_batch_size is {max_batch_size}, instances {instances}, threads {threads}; expected at least 0 "
            "for max_batch_size, and at least 1 for instances and threads"
        )
    libraries = {LIBRARY_NAME: Path(get_library_path())}
    if EXTENSIONS_DOMAIN in source.model.graph.opset_imports:
        if extensions is None or not Path(extensions).is_file():
            raise ModelError(
                f"{source.name} has a tokenizer; give extensions (--extensions), the path of a libortextensions.so "
                "that was built for C++ hosts from onnxruntime-extensions' sources; the one in the package needs "
                "Python"
            )
        if Path(extensions).name == LIBRARY_NAME:
            raise ArgumentError(f"extensions is {str(extensions)!r}, the name of Ortolan's library; rename the file")
        libraries[Path(extensions).name] = Path(extensions)
    repository = Path(output)
    folder = repository / chosen
    if folder.exists() or folder.is_symlink():
        raise OutputError(f"output folder {str(folder)!r} exists; remove it, or give another name")
    if path_on_server is not None and not Path(path_on_server).is_absolute():
        raise ArgumentError(f"path_on_server is {str(path_on_server)!r}, expected an absolute path")
    place = Path(path_on_server or repository.absolute()) / chosen / _VERSION
    config = _config(source.model, chosen, max_batch_size, instances, threads, [str(place / one) for one in libraries])
    # Triton expects this name for every model. Data files keep their names, because the model refers to them.
    files = {_MODEL: source.path} | {
        str(file.relative_to(source.external_root)): file for file in source.data_files if source.external_root
    }
    clash = files.keys() & libraries.keys() | ({_MODEL} & {str(file.name) for file in source.data_files})
    if clash:
        raise ModelError(f"external data of {source.name} is named {listing(clash)}, like another file of the folder")
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with work_folder(folder) as work:
            written = work / chosen
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
    """Return config.pbtxt, a ModelConfig in protobuf's text format."""
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
    """Return True if all inputs and outputs begin with the same symbolic dimension."""
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
            f"{value.name!r} has type {value.dtype}, expected a type of Triton: {listing(_TYPES.values())}"
        )
    if value.shape is None:
        raise ModelError(
            f"{value.name!r} has no shape, but Triton needs the number of dimensions; export the model again"
        )
    dims = [size if isinstance(size, int) else -1 for size in value.shape][int(batched) :]
    reshape = ""
    if not dims:  # Triton has no scalars: requests send [1], which Triton reshapes to []
        dims, reshape = [1], "\n  reshape {\n  }"
    return (
        f"  name: {_quoted(value.name or '')}\n  data_type: {_TYPES[value.dtype]}\n"
        f"  dims: [ {', '.join(map(str, dims))} ]{reshape}"
    )


def _parameter(key: str, value: str) -> str:
    return f"parameters {{\n  key: {_quoted(key)}\n  value {{\n    string_value: {_quoted(value)}\n  }}\n}}"


def _quoted(text: Any) -> str:
    """Return the text as a string of protobuf's text format."""
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in str(text).encode()
    )
    return f'"{escaped}"'
