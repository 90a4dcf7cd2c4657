"""ONNX Runtime sessions with Ortolan's operators."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import LibraryError, ModelError, SessionError, missing_model, one_line, wrong_type
from .library import get_library_path

if TYPE_CHECKING:
    import onnx
    import onnxruntime

# Config entry that marks session options as registered, because registering twice is an error in ONNX Runtime.
REGISTERED = "ortolan.registered"
_EXTENSIONS_DOMAIN = "ai.onnx.contrib"  # operators of onnxruntime-extensions: tokenizers
FOLDER_OF_DATA = "session.model_external_initializers_file_folder_path"
_PACKAGES = ("ortolan", "onnxruntime", "onnx", "onnx-ir", "numpy")


def cpu_info() -> dict[str, Any]:
    """Return the properties of this CPU on which kernels depend.

    Returns:
        A dict with these keys:

        - `name`: the name that the CPU reports.
        - `microarchitecture`: the matching row of ops/isa/tuning.inc, or "unknown".
        - `l1_bytes`, `l2_bytes`: data caches of a core, from that row, or from the system if the row is "unknown".
        - `detected_features`: the feature sets (ops/isa/feature_sets.inc) that the CPU has.
        - `features`: the feature sets that kernels may use; fewer if the environment variable ORTOLAN_ISA names a set.
        - `isa`: the last of `features`.
        - `isa_problem`: why ORTOLAN_ISA cannot be used, so that the operator library does not load; else "".

    Raises:
        LibraryError: The native module does not load.
    """
    try:
        from ortolan import _native
    except ImportError as error:
        raise LibraryError(
            f"the native module ortolan._native does not load: {error}; reinstall Ortolan (in a source tree: "
            "pip install .)"
        ) from error
    return dict(_native.cpu_info())


def package_versions() -> dict[str, str]:
    """Return the installed versions of packages that affect results and speed."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def known_cpu() -> dict[str, Any]:
    """Return `cpu_info`, or an empty dict if the native module does not load."""
    try:
        return cpu_info()
    except LibraryError:
        return {}


def register(session_options: onnxruntime.SessionOptions | None = None) -> onnxruntime.SessionOptions:
    """Register Ortolan's operators, so that sessions with these options can run optimized models.

    Registering the same options again has no effect.

    Args:
        session_options: The options to change; None: new ones, like those of `create_session`.

    Returns:
        The options, for `ORTModelForX.from_pretrained(…, session_options=ortolan.register())`.

    Raises:
        ArgumentTypeError: The argument is not an onnxruntime.SessionOptions.
        LibraryError: The operator library cannot be loaded.
    """
    import onnxruntime

    if session_options is None:
        session_options = new_options()
    if not isinstance(session_options, onnxruntime.SessionOptions):
        raise wrong_type("session_options", session_options, "an onnxruntime.SessionOptions")
    try:
        session_options.get_session_config_entry(REGISTERED)
        return session_options
    except RuntimeError:  # the entry is missing: not registered yet
        pass
    path = get_library_path()
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
        raise LibraryError(
            f"ONNX Runtime cannot load {path}: {one_line(error)}; run `ortolan doctor` for details"
        ) from error
    session_options.add_session_config_entry(REGISTERED, "1")
    return session_options


def new_options() -> onnxruntime.SessionOptions:
    """Return the session options that Ortolan uses by default: without memory patterns.

    Memory patterns reserve a call's tensors separately from the memory of operators, and need a plan for each input
    shape. With them, the process uses more memory, with more cache and TLB misses (docs/deploy.md).
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    return options


def create_session(
    path: str | os.PathLike[str] | onnx.ModelProto,
    session_options: onnxruntime.SessionOptions | None = None,
    providers: str | Sequence[Any] | None = None,
) -> onnxruntime.InferenceSession:
    """Open an ONNX Runtime session for a model, optimized or not.

    Args:
        path: The path of an ONNX file or of its folder, or a ModelProto.
        session_options: Options to use; Ortolan's operators are registered on them, and those of onnxruntime-extensions
            if the model needs them, as models with a tokenizer do.
        providers: Execution providers; default: those of the options, else the CPU.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        LibraryError: An operator library cannot be loaded.
        SessionError: The model cannot be opened.
    """
    options = session_options if session_options is not None else new_options()
    register(options)
    try:
        return _open(path, options, providers)
    except SessionError as error:
        # The error tells that the model needs the extensions. Few models need them, so files are not parsed in advance.
        if f"{_EXTENSIONS_DOMAIN}:" not in str(error):
            raise
    _register_extensions(options)
    return _open(path, options, providers)


def _register_extensions(session_options: onnxruntime.SessionOptions) -> None:
    try:
        import onnxruntime_extensions
    except ImportError as error:
        raise LibraryError(
            "the model needs operators of onnxruntime-extensions, as models with a tokenizer do; install it with: "
            "pip install onnxruntime-extensions tokenizers"
        ) from error
    try:
        session_options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
        raise LibraryError(
            f"ONNX Runtime cannot load onnxruntime-extensions: {one_line(error)}; install matching versions: "
            "pip install -U onnxruntime onnxruntime-extensions"
        ) from error


def _open(
    path: str | os.PathLike[str] | onnx.ModelProto,
    options: onnxruntime.SessionOptions,
    providers: str | Sequence[Any] | None,
) -> onnxruntime.InferenceSession:
    if not isinstance(path, str | os.PathLike) and hasattr(path, "SerializeToString"):  # paths need no import of onnx
        from ortolan.graph_passes.files.model_file import to_bytes

        return open_session(to_bytes(path), options, providers)
    return open_session(path, options, providers)


def open_session(
    model: str | os.PathLike[str] | bytes,
    options: onnxruntime.SessionOptions,
    providers: str | Sequence[Any] | None = None,
    data_folder: Path | None = None,
) -> onnxruntime.InferenceSession:
    """Open a session without registering operators.

    Args:
        model: The path of an ONNX file or of its folder, or the content of a file.
        options: Session options.
        providers: Execution providers; default: those of the options, else the CPU.
        data_folder: The folder of external data, if `model` is a file's content.

    Raises:
        ArgumentTypeError: `model` is not a path.
        SessionError: The model cannot be opened.
    """
    import onnxruntime

    name = "the model"
    if not isinstance(model, bytes):
        try:
            model = os.fspath(model)
        except TypeError:
            raise wrong_type("model", model, "the path of an ONNX file") from None
        if os.path.isdir(model):
            from ortolan.graph_passes.files.model_file import model_in

            try:
                model = os.fspath(model_in(Path(os.fsdecode(model))))
            except ModelError as error:
                raise SessionError(str(error)) from None
        name = repr(model)
        if not os.path.isfile(model):
            raise SessionError(missing_model(model))
        if os.path.getsize(model) == 0:
            raise SessionError(f"{name} is not an ONNX model: the file is empty; export the model to ONNX again")
    if data_folder is not None:
        options.add_session_config_entry(FOLDER_OF_DATA, str(data_folder))
    chosen = [providers] if isinstance(providers, str) else list(providers or [])
    if not chosen and not _names_providers(options):
        chosen = ["CPUExecutionProvider"]
    try:
        return onnxruntime.InferenceSession(model, options, providers=chosen)
    except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
        raise SessionError(f"ONNX Runtime cannot open {name}: {one_line(error)}{_advice(str(error))}") from error


def _names_providers(options: onnxruntime.SessionOptions) -> bool:
    has_providers = getattr(options, "has_providers", None)  # exists in onnxruntime 1.22 and later
    return has_providers is not None and bool(has_providers())


def _advice(message: str) -> str:
    """Return what to do about an error of ONNX Runtime."""
    known = {
        "is not a registered function/op": "; this ONNX Runtime lacks an operator of the model: for operators of "
        "ai.ortolan, open it with ortolan.create_session or call ortolan.register(session_options); for other ones, "
        "register their library too",
        "Domain already set in registry": "; the session options have the library twice: remove your "
        "register_custom_ops_library, or replace it by ortolan.register(session_options); if you added the execution "
        "provider, use ortolan.session_options() instead",
        "Could not find an implementation": "; this ONNX Runtime has no kernel for the operator's element type, as for "
        "most operators in bfloat16: `ortolan optimize` makes a float32 model of one in bfloat16, or export it in "
        "float32",
        "Protobuf parsing failed": "; the file is not an ONNX model or is truncated: export or download it again",
        "INVALID_PROTOBUF": "; the file is not an ONNX model or is truncated: export or download it again",
        "External initializer": "; the external data file is missing or truncated: copy it beside the model",
        "External data path": "; the external data file is missing or truncated: copy it beside the model",
        "GetFileLength": "; the external data file is missing: copy it beside the model",
        "Unsupported model IR version": "; this ONNX Runtime is too old for the model: pip install -U onnxruntime",
        "is till opset": "; this ONNX Runtime is too old for the model's opset: pip install -U onnxruntime",
    }
    return next((advice for part, advice in known.items() if part in message), "")
