"""The execution provider: models as they are, on Ortolan's kernels, in any session of this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from .errors import LibraryError, one_line
from .library import get_library_path
from .session import REGISTERED, new_options, register

if TYPE_CHECKING:
    import onnxruntime

PROVIDER = "OrtolanExecutionProvider"
REGISTRATION_NAME = "ortolan"
PRECISIONS = ("float32", "bf16", "int8")
CLAIMS = ("faster", "all")
CLAIMS_FILE = "claims_file"  # the provider's option, as in ops/provider/claims_log.h

_OLDEST = (1, 23)  # as kOldestApi in ops/provider/ort_api.h
_OFFERS_OPERATORS = (1, 24)  # from here on ONNX Runtime asks providers for their operators
_FACTORIES = b"CreateEpFactories\0"
_lock = threading.Lock()


def has_provider() -> bool:
    """Whether the installed library was built with the execution provider."""
    return _has_factories(get_library_path())


@lru_cache
def _has_factories(library: str) -> bool:
    with open(library, "rb") as file:
        return _FACTORIES in file.read()


def why_no_provider() -> str | None:
    """Return why the installed library has no execution provider and how to get it; None if it has one."""
    if has_provider():
        return None
    return (
        f"{get_library_path()} was built without the execution provider, which runs models as they are: CMake found no "
        "headers of ONNX Runtime's API 29; build again with npm installed, or with ORT_EP_INCLUDE_DIR set to the "
        "include folder of ONNX Runtime 1.29 or later"
    )


def library_with_provider() -> str:
    """The path of the installed library. Raises LibraryError where it was built without the provider."""
    missing = why_no_provider()
    if missing is not None:
        raise LibraryError(missing)
    return get_library_path()


def register_provider() -> None:
    """Makes `OrtolanExecutionProvider` known to ONNX Runtime in this process. Calling it again changes nothing.

    Raises LibraryError where ONNX Runtime is older than 1.23, or the library was built without the provider.
    """
    import onnxruntime

    if _version(onnxruntime) < _OLDEST:
        raise LibraryError(
            f"onnxruntime {onnxruntime.__version__} takes no execution provider from a library, 1.23 or later does: "
            "pip install -U onnxruntime; optimized models run on any from 1.21 on"
        )
    with _lock:
        if _devices(onnxruntime):
            return
        path = library_with_provider()
        try:
            onnxruntime.register_execution_provider_library(REGISTRATION_NAME, path)
        except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
            raise LibraryError(
                f"ONNX Runtime cannot register the execution provider of {path}: {one_line(error)}; "
                "`ortolan doctor` tells more"
            ) from error


def session_options(
    *, precision: Literal["float32", "bf16", "int8"] = "float32", claims: Literal["faster", "all"] = "faster"
) -> onnxruntime.SessionOptions:
    """New options for sessions that run models, optimized or not, on Ortolan's kernels.

    They know the provider and the operators. What the provider does not take runs on ONNX Runtime's own CPU provider.

    precision: what layers of floats become when the session is made. With float32 they stay ONNX Runtime's; bf16 and
    int8 are faster and change answers (see docs/provider.md). claims: "all" takes also what ONNX Runtime is faster with
    on this CPU.

    Raises ValueError for other values, LibraryError as register_provider does.
    """
    return options_with(checked_options(precision, claims))


def checked_options(precision: str, claims: str) -> dict[str, str]:
    """Options of the provider. Raises ValueError."""
    for name, found, known in (("precision", precision, PRECISIONS), ("claims", claims, CLAIMS)):
        if found not in known:
            raise ValueError(f"{name} is {found!r}, expected one of {', '.join(known)}")
    return {"precision": precision, "claims": claims}


def options_with(provider_options: Mapping[str, str]) -> onnxruntime.SessionOptions:
    """`session_options()`, with options of the provider's."""
    import onnxruntime

    register_provider()
    options = new_options()
    options.add_provider_for_devices(_devices(onnxruntime), dict(provider_options))
    if _version(onnxruntime) < _OFFERS_OPERATORS:
        register(options)
    else:
        options.add_session_config_entry(REGISTERED, "1")
    return options


def _devices(onnxruntime: Any) -> list[Any]:
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]


def _version(onnxruntime: Any) -> tuple[int, int]:
    major, minor = onnxruntime.__version__.split(".")[:2]
    return int(major), int(minor)
