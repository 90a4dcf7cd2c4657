"""Serving: the operator library and ONNX Runtime sessions that know it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import LibraryError, ModelError, SessionError, missing_model, one_line
from .library import get_library_path

if TYPE_CHECKING:
    import onnx
    import onnxruntime

# Options remember by this entry that they know the operators: registering them twice is an error in ONNX Runtime.
REGISTERED = "ortolan.registered"
_EXTENSIONS_DOMAIN = "ai.onnx.contrib"  # operators of onnxruntime-extensions: tokenizers
_FOLDER_OF_DATA = "session.model_external_initializers_file_folder_path"
_PACKAGES = ("ortolan", "onnxruntime", "onnx", "onnx-ir", "numpy")


def cpu_info() -> dict[str, Any]:
    """What kernels know of this CPU.

    name, microarchitecture: its own name for itself, and the row of ops/isa/tuning.inc that fits it.
    l1_bytes, l2_bytes: the caches of a core, data alone: as that row says, or the system where the row is "unknown".
    features, detected_features: the feature sets (ops/isa/feature_sets.inc) that kernels may use, and all that the CPU
    has; they differ where the environment variable ORTOLAN_ISA names a set.
    isa: the last of features.
    isa_problem: "", or why ORTOLAN_ISA cannot be used: then the operator library refuses to load.
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
    """The installed versions that decide what a model does, and how fast."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def known_cpu() -> dict[str, Any]:
    """`cpu_info`, or nothing where the native module does not load."""
    try:
        return cpu_info()
    except LibraryError:
        return {}


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Makes Ortolan's operators known to sessions created with these options. Calling it again changes nothing."""
    import onnxruntime

    if not isinstance(session_options, onnxruntime.SessionOptions):
        raise SessionError(
            f"session_options is a {type(session_options).__name__}, expected an onnxruntime.SessionOptions"
        )
    try:
        session_options.get_session_config_entry(REGISTERED)
        return
    except RuntimeError:  # no such entry: not registered yet
        pass
    path = get_library_path()
    try:
        session_options.register_custom_ops_library(path)
    except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
        raise LibraryError(
            f"ONNX Runtime cannot load {path}: {one_line(error)}; `ortolan doctor` tells more"
        ) from error
    session_options.add_session_config_entry(REGISTERED, "1")


def new_options() -> onnxruntime.SessionOptions:
    """The session options of all sessions that Ortolan makes by itself.

    They plan no memory patterns: these hold a call's tensors apart from what operators use for themselves, so that more
    memory is in use, which caches and page tables feel (docs/deploy.md), and each shape of inputs gets a plan.
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
    """An ONNX Runtime session for a model, optimized or not: the path of a file or of its folder, or a ModelProto.

    The given options are used, and know the library after; and that of onnxruntime-extensions if the model needs it, as
    one with a tokenizer does. Runs on the CPU unless other providers are named, here or by the options.

    Raises SessionError if the model cannot be opened, LibraryError if an operator library cannot be loaded.
    """

    options = session_options if session_options is not None else new_options()
    register(options)
    try:
        return _open(path, options, providers)
    except SessionError as error:
        # Found only now: a model's file is not read twice for the sake of those few that need it.
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
            f"ONNX Runtime cannot load onnxruntime-extensions: {one_line(error)}; install versions that fit each "
            "other: pip install -U onnxruntime onnxruntime-extensions"
        ) from error


def _open(
    path: str | os.PathLike[str] | onnx.ModelProto,
    options: onnxruntime.SessionOptions,
    providers: str | Sequence[Any] | None,
) -> onnxruntime.InferenceSession:
    if not isinstance(path, str | os.PathLike) and hasattr(path, "SerializeToString"):  # a file is served without onnx
        from ortolan.graph_passes.files.model_file import to_bytes

        return open_session(to_bytes(path), options, providers)
    return open_session(path, options, providers)


def open_session(
    model: str | os.PathLike[str] | bytes,
    options: onnxruntime.SessionOptions,
    providers: str | Sequence[Any] | None = None,
    data_folder: Path | None = None,
) -> onnxruntime.InferenceSession:
    """A session without our library. `model` may be a file's content, whose external data lies in data_folder."""
    import onnxruntime

    name = "the model"
    if not isinstance(model, bytes):
        try:
            model = os.fspath(model)
        except TypeError:
            raise SessionError(f"model is a {type(model).__name__}, expected the path of an ONNX file") from None
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
        options.add_session_config_entry(_FOLDER_OF_DATA, str(data_folder))
    chosen = [providers] if isinstance(providers, str) else list(providers or [])
    if not chosen and not _names_providers(options):
        chosen = ["CPUExecutionProvider"]
    try:
        return onnxruntime.InferenceSession(model, options, providers=chosen)
    except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
        raise SessionError(f"ONNX Runtime cannot open {name}: {one_line(error)}{_advice(str(error))}") from error


def _names_providers(options: onnxruntime.SessionOptions) -> bool:
    has_providers = getattr(options, "has_providers", None)  # from onnxruntime 1.22 on
    return has_providers is not None and bool(has_providers())


def _advice(message: str) -> str:
    """What to do about an error of ONNX Runtime."""
    known = {
        "is not a registered function/op": "; the model uses operators that this ONNX Runtime does not know: for those "
        "of ai.ortolan, open it with ortolan.create_session or call ortolan.register(session_options); for others, "
        "register their library too",
        "Domain already set in registry": "; these session options know the library twice: leave out your own "
        "register_custom_ops_library, or call ortolan.register(session_options) in its place; options to which the "
        "execution provider was added by hand know it too: take ortolan.session_options()",
        "Could not find an implementation": "; this ONNX Runtime has no kernel for the operator's element type, as for "
        "most operators in bfloat16: `ortolan optimize` makes a float32 model of one in bfloat16, or export it in "
        "float32",
        "Protobuf parsing failed": "; the file is no ONNX model, or it is cut short: export or download it again",
        "INVALID_PROTOBUF": "; the file is no ONNX model, or it is cut short: export or download it again",
        "External initializer": "; the external data file is missing or cut short: copy it beside the model",
        "External data path": "; the external data file is missing or cut short: copy it beside the model",
        "GetFileLength": "; the external data file is missing: copy it beside the model",
        "Unsupported model IR version": "; this ONNX Runtime is too old for the model: pip install -U onnxruntime",
        "is till opset": "; this ONNX Runtime is too old for the model's opset: pip install -U onnxruntime",
    }
    return next((advice for part, advice in known.items() if part in message), "")
