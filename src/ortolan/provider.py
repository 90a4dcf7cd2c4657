"""The execution provider, which runs unchanged models on Ortolan's kernels in any session of this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from .errors import ArgumentError, LibraryError, one_line
from .library import get_library_path
from .optimize_options import check_reproducible
from .session import REGISTERED, new_options, register
from .times_file import times_path

if TYPE_CHECKING:
    import onnxruntime

PROVIDER = "OrtolanExecutionProvider"
REGISTRATION_NAME = "ortolan"
PRECISIONS = ("float32", "bf16", "int8")
CLAIMS = ("faster", "all")
TIMES_FILE = "times_file"  # name of a provider option: measured times of layers (times_file.py)
CLAIMS_FILE = "claims_file"  # name of a provider option (ops/provider/claims_log.h)

_OLDEST = (1, 23)  # oldest supported ONNX Runtime; equals kOldestApi in ops/provider/ort_api.h
_OFFERS_OPERATORS = (1, 24)  # first version of ONNX Runtime that gets custom operators from providers
_lock = threading.Lock()


def register_provider() -> None:
    """Register `OrtolanExecutionProvider` in ONNX Runtime, for this process. Calling it again has no effect.

    Raises:
        LibraryError: ONNX Runtime is older than 1.23, or cannot load the library.
    """
    import onnxruntime

    if _version(onnxruntime) < _OLDEST:
        raise LibraryError(
            f"onnxruntime {onnxruntime.__version__} cannot load execution providers, which needs 1.23 or later: "
            "pip install -U onnxruntime; optimized models need no provider and run on 1.21 or later"
        )
    with _lock:
        if _devices(onnxruntime):
            return
        path = get_library_path()
        try:
            onnxruntime.register_execution_provider_library(REGISTRATION_NAME, path)
        except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
            raise LibraryError(
                f"ONNX Runtime cannot register the execution provider of {path}: {one_line(error)}; "
                "run `ortolan doctor` for details"
            ) from error


def session_options(
    *,
    precision: Literal["float32", "bf16", "int8"] = "float32",
    claims: Literal["faster", "all"] = "faster",
    reproducible: Literal["everywhere"] | None = None,
) -> onnxruntime.SessionOptions:
    """Return new options for sessions with Ortolan's execution provider.

    Such sessions run unchanged models on Ortolan's kernels, and also optimized models. Nodes that the provider does not
    claim run on ONNX Runtime's CPU provider. For optimized models alone, `register` suffices.

    Args:
        precision: The type that float32 layers become when a session is created. With float32 they are left to ONNX
            Runtime; bf16 and int8 are faster and change results (docs/provider.md).
        claims: "faster" claims nodes that are faster than in ONNX Runtime on this CPU, by the times that searches keep
            (`ortolan times`) or by known limits of the CPU; "all" claims every supported node.
        reproducible: "everywhere": claimed nodes give the same bytes on every CPU, and every supported node is claimed;
            excludes precision bf16. It does not cover attention with or beside a cache that stays in float32. None: the
            fastest order of sums on this CPU.

    Raises:
        ArgumentError: An argument has another value.
        LibraryError: As for `register_provider`.
    """
    return options_with(checked_options(precision, claims, reproducible))


def checked_options(precision: str, claims: str, reproducible: str | None = None) -> dict[str, str]:
    """Return the options of the provider. Raises ArgumentError for an unknown value, or if two values conflict."""
    check_reproducible(reproducible)
    if reproducible is not None and precision == "bf16":
        raise ArgumentError(
            f"precision is 'bf16', whose sums depend on the CPU, but reproducible is {reproducible!r}; give precision "
            "'int8' or 'float32'"
        )
    for name, found, known in (("precision", precision, PRECISIONS), ("claims", claims, CLAIMS)):
        if found not in known:
            raise ArgumentError(f"{name} is {found!r}, expected one of {', '.join(known)}")
    return {"precision": precision, "claims": claims} | ({"reproducible": reproducible} if reproducible else {})


def options_with(provider_options: Mapping[str, str]) -> onnxruntime.SessionOptions:
    """Return new session options with the provider and its options. Times of layers come from the cache folder."""
    import onnxruntime

    register_provider()
    options = new_options()
    options.add_provider_for_devices(_devices(onnxruntime), {TIMES_FILE: str(times_path()), **provider_options})
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
