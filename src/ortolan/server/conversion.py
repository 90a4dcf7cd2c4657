"""Converts a model to the form for serving, once, into the cache folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ModelError, missing_model

if TYPE_CHECKING:
    from ..progress import Progress

Kind = Literal["serving", "decoder", "recurrent", "encoder"]


def model_kind(path: Path) -> Kind:
    """Return what an ONNX model is, from its inputs.

    A decoder is in the form for serving or not, or has recurrent states, for which there is no such form. Other models
    are encoders.

    Raises:
        ModelError: The model cannot be read, or has another version of the form for serving.
    """
    return graph_kind(load_graph(path))


def load_graph(path: Path) -> Any:
    """Load a file or a folder's model, without its weights."""
    import onnx_ir as ir
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    from ortolan.graph_passes.files.model_file import model_in, not_a_model

    file = model_in(path) if path.is_dir() else path
    try:
        model = ir.load(file)
    except DecodeError:
        said = not_a_model(file, file.stat().st_size)
        raise ModelError(f"{said}; give an ONNX file, a folder with one, or a GGUF file") from None
    except Exception as error:  # of onnx_ir, which have no common type
        raise ModelError(f"model {str(file)!r} cannot be read: {error}") from None
    if not model.graph.inputs:
        raise ModelError(f"{str(file)!r} is not an ONNX model: it has no inputs")
    return model


def graph_kind(model: Any) -> Kind:
    """Return what a loaded model is, see `model_kind`."""
    from ortolan.graph_passes.serve.form import is_serving_form

    if is_serving_form(model):
        return "serving"
    cached = any((value.name or "").startswith("past_key_values.") for value in model.graph.inputs)
    return "recurrent" if _has_states(model) else "decoder" if cached else "encoder"


def _has_states(model: Any) -> bool:
    from ..generate import is_state

    return any(value.shape is not None and is_state(value.name or "", value.shape) for value in model.graph.inputs)


def serving_folder(
    source: Path, cache: Path, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> Path:
    """Return a folder with a decoder in the form for serving, or with a decoder that has recurrent states.

    A GGUF file, and a folder with another form, are converted into the cache folder. A later call with the same files
    finds the result there.

    Args:
        source: A GGUF file, a folder with a decoder, or a folder that needs no conversion.
        cache: The cache folder.
        progress: As for `optimize_onnx`.
        say: Called with a line if a conversion begins, or if another process is converting the same model.

    Raises:
        OrtolanError: The model cannot be read or converted.
    """
    from ortolan.graph_passes.files.work_folder import remove_abandoned

    if not source.exists():
        raise ModelError(missing_model(source))
    is_gguf = source.is_file() and source.suffix == ".gguf"
    if not is_gguf:
        if not source.is_dir():
            raise ModelError(f"{str(source)!r} is a file, expected a folder with model.onnx, or a .gguf file")
        model = load_graph(source)
        if graph_kind(model) in ("serving", "recurrent"):
            return source
        _require_original(model, source)
    target = target_folder(source, cache)
    if target.is_dir():
        return target
    if is_gguf:
        from ..models.gguf.header import check_header

        check_header(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    name = Path(os.path.abspath(source)).name
    with _locked(target.with_name(f"{target.name}.lock"), name, say):
        if not target.is_dir():  # another process may have made it meanwhile
            remove_abandoned(target)
            if say is not None:
                say(f"converting {name} to the form for serving (once)")
            _convert(source, target, is_gguf, progress)
    return target


def target_folder(source: Path, cache: Path) -> Path:
    """Return the folder for the form for serving of a GGUF file or a folder, whether it exists or not."""
    path = Path(os.path.abspath(source))  # the name that the user typed, not that of a link's target
    # A folder's name may have dots, as in Qwen2.5-0.5B, which do not begin a suffix.
    name = path.stem if source.is_file() else path.name
    return cache / "serving" / f"{name}-{_fingerprint(source)}"


def _require_original(model: Any, source: Path) -> None:
    from ortolan.graph_passes.passes.normalize import optimized_with

    if optimized_with(model) is not None:
        raise ModelError(
            f"{str(source)!r} was optimized without the form for serving; give the GGUF file or the original folder "
            "instead, or make it again with --serve (ortolan import or optimize)"
        )


def _convert(source: Path, target: Path, is_gguf: bool, progress: Progress | None) -> None:
    if is_gguf:
        from ..importer import import_gguf

        import_gguf(source, target, serve=True, progress=progress)
    else:
        from ..optimize import optimize_onnx

        optimize_onnx(source, target, serve=True, progress=progress)


@contextmanager
def _locked(path: Path, name: str, say: Callable[[str], None] | None) -> Iterator[None]:
    """Wait until no other process has the lock: several replicas start at the same time."""
    import fcntl

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if say is not None:
                say(f"waiting for another process, which is converting {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fingerprint(source: Path) -> str:
    """Return a name for the content of a file or folder, and for how this version of Ortolan converts it.

    The content is known by paths, sizes and times, which is quick for any size.
    """
    from importlib.metadata import version

    from ortolan.graph_passes.serve.form import FORM_VERSION

    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    digest = hashlib.sha256(f"{version('ortolan')}\0{FORM_VERSION}\0".encode())
    for path in files:
        facts = path.stat()
        digest.update(f"{os.fspath(path.resolve())}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]
