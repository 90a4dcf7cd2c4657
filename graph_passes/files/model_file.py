"""Reads untrusted model files, and writes models so that after a crash either the old or the new files are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from ortolan.errors import ModelError, OutputError, listing, missing_model, wrong_type

from .genai_folder import CONFIG_NAME, decoder_file
from .output import check_file, sync

MODEL_SUFFIX = ".onnx"
LARGE_MODEL = 10**9  # models of at least this many bytes are large
# Models with at least this many bytes of weights get an external data file, which ONNX Runtime maps. (It copies weights
# that are inside the model file.)
EMBED_LIMIT = 8 * 1024**2
_MAX_DIGITS = 6  # longest name of a dimension that is read as an integer
# Tensors of fewer bytes stay in the model file, where shape inference sees them. External tensors start at a page.
EXTERNAL_THRESHOLD = 8192


@dataclass
class ModelFile:
    """The given model: its IR, which passes change, and the files that are needed to run the original."""

    model: ir.Model
    path: Path | None
    proto: onnx.ModelProto | None  # set only if the model was given as a ModelProto
    external_root: Path | None = None  # the folder that contains all external data
    data_files: list[Path] = field(default_factory=list)
    folder: Path | None = None  # the folder that the user gave, if the model was found in it
    widened: bool = False  # bfloat16 tensors were converted to float32 (find/bfloat16.py)

    @property
    def name(self) -> str:
        """The model's name in messages."""
        return str(self.path) if self.path else "the given ModelProto"

    @property
    def size(self) -> int:
        """Bytes on disk, including external data."""
        if self.path is None:
            assert self.proto is not None
            size: int = self.proto.ByteSize()
            return size
        return sum(os.path.getsize(file) for file in (self.path, *self.data_files))

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor in other files."""
        return max((tensor.nbytes for tensor in external_tensors(self.model)), default=0)

    @property
    def is_large(self) -> bool:
        """True if the weights should stay in their file."""
        return self.size > LARGE_MODEL


def load_model(source: str | os.PathLike[str] | onnx.ModelProto) -> ModelFile:
    """Read a model, or the model in a folder; external data stays on disk and is mapped when needed.

    Raises:
        ModelError: The model cannot be read.
    """
    if isinstance(source, onnx.ModelProto):
        file = ModelFile(_to_ir(source, "the given ModelProto"), None, source)
        _name_apart(file.model)
        for tensor in external_tensors(file.model):
            raise ModelError(
                f"tensor {tensor.name!r} of the given ModelProto is stored in the file {str(tensor.location)!r}, "
                "but a ModelProto does not have a folder; give the path of the model instead"
            )
        return file
    try:
        path = Path(source)
    except TypeError:
        raise wrong_type("model", source, "a path or an onnx.ModelProto") from None
    folder = path if path.is_dir() else None
    if folder is not None:
        path = model_in(folder)
    file = ModelFile(_to_ir(_read_proto(path), str(path)), path, None, folder=folder)
    _find_external_data(file, path)
    return file


def model_in(folder: Path) -> Path:
    """Return the folder's ONNX file.

    This is the only ONNX file, the decoder that genai_config.json names, or model.onnx. If there is no ONNX file, the
    subfolder onnx/ is searched, as on model hubs.
    """
    try:
        listings = [folder.iterdir(), (folder / "onnx").glob("*")]
        found_files = ([file for file in one if file.suffix == MODEL_SUFFIX and file.is_file()] for one in listings)
        files = sorted(next(filter(None, found_files), []))
        deeper = {file.parent for file in folder.glob(f"*/*{MODEL_SUFFIX}")}
    except OSError as error:
        raise ModelError(f"folder {str(folder)!r} cannot be read: {error.strerror}") from error
    names = [f"model{MODEL_SUFFIX}"]
    if len(files) > 1 and (folder / CONFIG_NAME).is_file():
        names.insert(0, decoder_file(folder / CONFIG_NAME) or "")
    found = next((named for name in names if (named := [file for file in files if file.name == name])), files)
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"folder {str(folder)!r} holds several ONNX files: {listing(file.name for file in found)}; give the path "
            "of one of them"
        )
    advice = f"; did you mean {str(deeper.pop())!r}?" if len(deeper) == 1 else f", expected one{_other_weights(folder)}"
    raise ModelError(f"folder {str(folder)!r} holds no ONNX file{advice}")


def _other_weights(folder: Path) -> str:
    """Return advice for a folder without an ONNX file, depending on the other formats in it."""
    torch = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("pytorch_model*.bin"))]
    if torch:
        return (
            f"; it holds PyTorch weights ({torch[0].name}): export the model first, with optimum-cli export onnx "
            f"--model {folder} NEW_FOLDER, and give the new folder"
        )
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return f"; it holds a GGUF file: import it with ortolan import, or serve it with ortolan serve {gguf[0]}"
    return "; export a model to ONNX first: optimum-cli export onnx --model MODEL FOLDER"


def not_a_model(path: Path, size: int) -> str:
    """Return the message for a file of `size` bytes that is not a protobuf message."""
    return f"{str(path)!r} is not an ONNX model, or it is cut short: its {size} bytes are not a protobuf message"


def _read_proto(path: Path) -> onnx.ModelProto:
    if path.exists() and not path.is_file():
        raise ModelError(f"{str(path)!r} is not a regular file, expected an ONNX file; write the model to a file first")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(missing_model(path)) from None
    except OSError as error:
        raise ModelError(f"model file {str(path)!r} cannot be read: {error.strerror}") from error
    advice = "; export the model to ONNX first, for example with: optimum-cli export onnx --model MODEL FOLDER"
    if not content:
        raise ModelError(f"{str(path)!r} is not an ONNX model: the file is empty{advice}")
    if content[:4] == b"GGUF":
        raise ModelError(
            f"{str(path)!r} is a GGUF file, expected ONNX; a decoder can be imported: ortolan import (in Python: "
            "ortolan.import_gguf)"
        )
    if content[4:8] == b"ORTM":
        raise ModelError(f"{str(path)!r} is in ONNX Runtime's own ORT format, expected ONNX{advice}")
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(content)
    except DecodeError:
        raise ModelError(f"{not_a_model(path, len(content))}{advice}") from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{str(path)!r} is not an ONNX model: it holds no graph or no opset{advice}")
    return proto


def _to_ir(proto: onnx.ModelProto, name: str) -> ir.Model:
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{name} is not an ONNX model: it holds no graph or no opset")
    sparse = [tensor.values.name for tensor in proto.graph.sparse_initializer]
    if sparse:
        raise ModelError(
            f"{name} holds sparse initializers, which Ortolan does not read: {listing(sparse)}; store them as dense "
            "tensors, or export the model again without sparse tensors"
        )
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # the deserializer raises many types of exceptions for malformed models
        raise ModelError(f"{name} is not a well-formed ONNX model: {_innermost(error)}") from error
    _read_numbers(model)
    _drop_shared_symbols(model)
    return model


def _name_apart(model: ir.Model) -> None:
    """Wrap the tensors of the caller's ModelProto, so that passes do not rename the caller's tensors."""
    for tensor, put in list(tensor_slots(model)):
        if isinstance(tensor, ir.TensorProtoTensor) and tensor.dtype != ir.DataType.STRING:
            put(ir.LazyTensor(lambda tensor=tensor: tensor, tensor.dtype, tensor.shape, name=tensor.name))  # type: ignore[misc]


def _read_numbers(model: ir.Model) -> None:
    """Turn cache dimensions named like "16", which torch's exporter writes for heads and head size, into integers."""
    for value in model.graph.inputs:
        if value.shape is not None and len(value.shape) == 4:
            batch, heads, length, size = value.shape
            value.shape = ir.Shape([batch, _numbered(heads), length, _numbered(size)])


def _drop_shared_symbols(model: ir.Model) -> None:
    """Drop a symbol that names both axes of token ids or of a mask, because the two axes have different sizes."""
    pairs = [value.shape for value in model.graph.inputs if value.shape is not None and len(value.shape) == 2]
    shared = {str(one[0]) for one in pairs if isinstance(one[0], ir.SymbolicDim) and one[0].value and one[0] == one[1]}
    if not shared:
        return
    values = [*model.graph.inputs]
    for graph in model.graphs():
        values += [output for node in graph for output in node.outputs]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([None if str(dim) in shared else dim for dim in value.shape])


def _numbered(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    name = dim.value if isinstance(dim, ir.SymbolicDim) else None
    is_number = name is not None and name.isascii() and name.isdecimal() and len(name) <= _MAX_DIGITS
    return int(name) if name is not None and is_number and int(name) else dim


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def tensor_slots(model: ir.Model) -> Iterator[tuple[ir.TensorProtocol, Callable[[ir.TensorProtocol], None]]]:
    """Yield every tensor of initializers and attributes, each with a function that replaces it."""
    for graph in model.graphs():
        for value in list(graph.initializers.values()):
            if value.const_value is not None:
                yield value.const_value, lambda tensor, value=value: setattr(value, "const_value", tensor)  # type: ignore[misc]
    nodes = list(model.graph.all_nodes())
    for function in model.functions.values():
        nodes += list(function.all_nodes())
    for node in nodes:
        for name, attr in list(node.attributes.items()):
            if attr.type == ir.AttributeType.TENSOR and not attr.is_ref():

                def put(tensor: ir.TensorProtocol, node: ir.Node = node, name: str = name) -> None:
                    node.attributes[name] = ir.AttrTensor(name, tensor)

                yield attr.as_tensor(), put


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield all tensors that are stored in external files."""
    return (tensor for tensor, _ in tensor_slots(model) if isinstance(tensor, ir.ExternalTensor))


def release_maps(model_tensors: list[ir.ExternalTensor]) -> None:
    """Unmap tensors, so that the pages that were read do not count as this process's memory."""
    for tensor in model_tensors:
        if tensor.raw is not None:
            with suppress(BufferError):  # a caller still uses an array; the file is unmapped when the array is freed
                tensor.release()


def _find_external_data(file: ModelFile, path: Path) -> None:
    """Check that all external data exists, and point the tensors at the real files.

    A model file is untrusted: its data must be below the model's folder or (as in download caches) the folder that the
    model's link leads to.
    """
    slots = [(tensor, put) for tensor, put in tensor_slots(file.model) if isinstance(tensor, ir.ExternalTensor)]
    if not slots:
        return
    folder = path.absolute().parent
    files = {}
    for tensor, _ in slots:
        location = str(tensor.location)
        if os.path.isabs(location) or ".." in Path(location).parts or not location:
            raise ModelError(
                f"tensor {tensor.name!r} of {str(path)!r} points to external data at {location!r}, "
                "expected a path below the model's folder"
            )
        files[location] = Path(os.path.realpath(folder / location))
    roots = [Path(os.path.realpath(folder)), Path(os.path.realpath(path)).parent]
    root = next((root for root in roots if all(data.is_relative_to(root) for data in files.values())), None)
    if root is None:
        raise ModelError(
            f"external data of {str(path)!r} is linked out of the model's folder: "
            f"{', '.join(sorted(files))}; copy the files beside the model"
        )
    for tensor, put in slots:
        data = files[str(tensor.location)]
        _check_external(tensor, data, path)
        located = ir.ExternalTensor(
            data.relative_to(root),
            tensor.offset,
            tensor.nbytes,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
            base_dir=str(root),
        )
        put(located)
    file.external_root = root
    file.data_files = sorted(set(files.values()))


def _check_external(tensor: ir.ExternalTensor, data: Path, path: Path) -> None:
    where = f"external data of tensor {tensor.name!r} of {str(path)!r}"
    try:
        status = os.stat(data)
    except OSError:
        raise ModelError(
            f"{where} is missing: there is no file {str(data)!r}; copy or download it to where the model expects it"
        ) from None
    if status.st_nlink > 1 and not _is_kept_twice(data, status):
        raise ModelError(
            f"{where}, {str(data)!r}, has several hard links, so it may be a file from outside the model's folder; "
            "replace it by a copy"
        )
    if tensor.length is not None and tensor.length != tensor.nbytes:
        raise ModelError(f"{where} has {tensor.length} bytes, expected {tensor.nbytes} for its shape and type")
    end = (tensor.offset or 0) + tensor.nbytes
    if status.st_size < end:
        raise ModelError(
            f"{where} is cut short: {str(data)!r} holds {status.st_size} bytes, expected at least {end}; "
            "download or export the model again"
        )


def write_model(
    model: ir.Model, path: Path, on_tensor: Callable[[int, int], None], embed_limit: int | None = None
) -> None:
    """Write the model; if its weights have at least embed_limit bytes (None: EMBED_LIMIT), also write `<path>.data`."""
    slots = list(tensor_slots(model))
    total = sum(tensor.nbytes for tensor, _ in slots)
    try:
        if total >= (EMBED_LIMIT if embed_limit is None else embed_limit):
            ir.save(
                model,
                path,
                format="protobuf",
                external_data=path.name + ".data",
                size_threshold_bytes=EXTERNAL_THRESHOLD,
                # Kernels read the mapped bytes, and require data aligned to cache lines.
                alignment=64,
                align_threshold=0,
                callback=lambda _, info: on_tensor(info.index + 1, info.total),
            )
        else:
            with _embedded(slots):
                path.write_bytes(ir.to_proto(model).SerializeToString())
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model with all weights inside."""
    with _embedded(list(tensor_slots(model))):
        return ir.to_proto(model)


def to_bytes(model: ir.Model | onnx.ModelProto) -> bytes:
    """Serialize the model; external tensors stay references to their files."""
    try:
        proto = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
        content: bytes = proto.SerializeToString()
        return content
    except (EncodeError, ValueError) as error:
        raise ModelError(
            f"the model's weights do not fit into one protobuf message (2 GiB): {error}; "
            "save it with external data and give its path"
        ) from error


@contextmanager
def _embedded(slots: list[tuple[ir.TensorProtocol, Callable[[ir.TensorProtocol], None]]]) -> Iterator[None]:
    """Inside the with statement, external tensors load their data when the model is serialized."""
    files = [(tensor, put) for tensor, put in slots if isinstance(tensor, ir.ExternalTensor)]
    for tensor, put in files:

        def read(tensor: ir.ExternalTensor = tensor) -> ir.TensorProtocol:
            array = np.array(tensor.numpy())
            release_maps([tensor])
            return ir.Tensor(array, dtype=tensor.dtype)

        put(ir.LazyTensor(read, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name))
    try:
        yield
    finally:
        for tensor, put in files:
            put(tensor)


def check_output(output: Path, source: ModelFile) -> None:
    """Refuse an output that cannot be written, or that would overwrite the input or its data."""
    check_file(output, "model.onnx")
    if data_path(output).exists() and not data_path(output).is_file():
        raise OutputError(f"output {str(data_path(output))!r} is not a regular file; choose another output")
    inputs = [file for file in (source.path, *source.data_files) if file is not None]
    for target in (output, data_path(output)):
        for file in inputs:
            if target.exists() and os.path.samefile(target, file):
                raise OutputError(
                    f"output {str(output)!r} would overwrite {str(file)!r}, which belongs to the input; "
                    "choose another name"
                )


def data_path(model_path: Path) -> Path:
    """Return the path of a model's external data file."""
    return model_path.with_name(model_path.name + ".data")


def move_into_place(written: Path, output: Path) -> None:
    """Move a model and its data file from a temporary folder (on the same disk) to their final names.

    Two files cannot be replaced at once. So before the data file is replaced, its data get a second name,
    `<output>.data.replaced`, and the old model is changed to refer to that name. Even if the process is killed,
    `output` is either the old or the new model, with its data. If an exception is raised, the old pair is restored.
    """
    backup = written.parent / "replaced"
    data, new_data, kept = data_path(output), data_path(written), _kept_path(data_path(output))
    undo: list[Callable[[], None]] = []  # each entry is added before its step, in case of an interrupt
    try:
        backup.mkdir()
        for file in (written, new_data):
            if file.exists():
                sync(file)
        old = _locations(output)
        owns_data, has_data = data.name in old and data.is_file(), new_data.exists()
        if has_data and owns_data:
            _point_to_kept_data(output, backup, undo)
            undo.append(lambda: _link_over(kept, data))
            os.replace(new_data, data)
        elif has_data:
            if data.exists():
                undo.append(lambda: _put_back(backup / data.name, data))
                os.replace(data, backup / data.name)
            undo.append(lambda: _put_back(data, new_data))
            os.replace(new_data, data)
        os.replace(written, output)
    except BaseException as error:
        if written.exists():  # if it does not exist, the new pair is already complete
            for step in reversed(undo):
                step()
        if isinstance(error, OSError):
            raise OutputError(f"cannot write {str(output)!r}: {error.strerror}") from error
        raise
    with suppress(OSError):  # files that cannot be deleted are harmless
        if owns_data and not has_data:
            data.unlink()
        if owns_data or kept.name in old:
            kept.unlink(missing_ok=True)


def _point_to_kept_data(output: Path, backup: Path, undo: list[Callable[[], None]]) -> None:
    """Give the data of the model at `output` a second name, and make the model refer to that name."""
    data, original = data_path(output), backup / output.name
    kept, pointing = _kept_path(data), backup / "pointing.onnx"
    proto = onnx.ModelProto.FromString(output.read_bytes())
    for entry in _location_entries(proto):
        if entry.value == data.name:
            entry.value = kept.name
    pointing.write_bytes(proto.SerializeToString())
    sync(pointing)
    _link(output, original)
    kept.unlink(missing_ok=True)
    undo.append(lambda: kept.unlink(missing_ok=True))
    _link(data, kept)
    undo.append(lambda: os.replace(original, output))
    os.replace(pointing, output)


def _kept_path(data: Path) -> Path:
    return data.with_name(data.name + ".replaced")


def _is_kept_twice(data: Path, status: os.stat_result) -> bool:
    """Return whether a data file has a second name because `move_into_place` was killed."""
    names = (_kept_path(data), data.with_name(data.name.removesuffix(".replaced")))
    return status.st_nlink == 2 and any(
        name != data and name.is_file() and not name.is_symlink() and os.path.samestat(os.stat(name), status)
        for name in names
    )


def _link(file: Path, name: Path) -> None:
    try:
        os.link(file, name)
    except OSError:  # the file system has no hard links
        shutil.copyfile(file, name)


def _link_over(file: Path, target: Path) -> None:
    """Give a file a second name, replacing any file of that name."""
    if os.path.samefile(file, target):
        return
    name = target.with_name(target.name + ".restored")
    name.unlink(missing_ok=True)
    _link(file, name)
    os.replace(name, target)


def _put_back(source: Path, target: Path) -> None:
    if source.exists() and not target.exists():
        os.replace(source, target)


def _locations(path: Path) -> set[str]:
    """Return the data files that the model at `path` names; empty if there is no model."""
    if not path.is_file():
        return set()
    try:
        return {entry.value for entry in _location_entries(onnx.ModelProto.FromString(path.read_bytes()))}
    except DecodeError:
        return set()


def _location_entries(message: Any) -> Iterator[onnx.StringStringEntryProto]:
    """Yield the location entries of external tensors in a protobuf message, with subgraphs and functions."""
    if isinstance(message, onnx.TensorProto):
        yield from (entry for entry in message.external_data if entry.key == "location")
        return
    for field_of, value in message.ListFields():
        if field_of.message_type is not None:
            for one in value if isinstance(value, Sequence) else (value,):
                yield from _location_entries(one)
