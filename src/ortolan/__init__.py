"""Ortolan makes transformer ONNX models smaller and faster on CPUs, inside stock ONNX Runtime.

report = ortolan.optimize_onnx("model.onnx", "fast.onnx", weights="int8")
session = ortolan.create_session("fast.onnx")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    ArgumentError,
    ArgumentTypeError,
    CalibrationError,
    LibraryError,
    ModelError,
    NothingToReplaceError,
    OrtolanError,
    OutputError,
    RecipeError,
    SessionError,
    VerificationError,
)

if TYPE_CHECKING:
    from ortolan.graph_passes.recipe import Recipe
    from ortolan.graph_passes.report.figures import Timing
    from ortolan.graph_passes.report.optimization import CacheReport, LayerReport, OptimizationReport, OutputDeviation
    from ortolan.graph_passes.text.text_plan import TextInput
    from ortolan.library import get_library_path
    from ortolan.provider import register_provider, session_options
    from ortolan.session import cpu_info, create_session, register

    from .embedding import RankedText, embed, embed_stream, rerank
    from .importer import import_gguf
    from .inspection import Inspection, inspect_onnx
    from .last_logits import keep_last_logits
    from .optimize import optimize_onnx, search
    from .optimize_options import OptimizeOptions
    from .provider_inspection import ProviderInspection, ProviderNode, inspect_provider
    from .reranker import make_reranker
    from .text_encoder import TextEncoder
    from .token_vectors import SparseVectors, TokenVectors, embed_sparse, embed_tokens

    __version__: str

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CacheReport",
    "CalibrationError",
    "Inspection",
    "LayerReport",
    "LibraryError",
    "ModelError",
    "NothingToReplaceError",
    "OptimizationReport",
    "OptimizeOptions",
    "OrtolanError",
    "OutputDeviation",
    "OutputError",
    "ProviderInspection",
    "ProviderNode",
    "RankedText",
    "Recipe",
    "RecipeError",
    "SessionError",
    "SparseVectors",
    "TextEncoder",
    "TextInput",
    "Timing",
    "TokenVectors",
    "VerificationError",
    "__version__",
    "cpu_info",
    "create_session",
    "embed",
    "embed_sparse",
    "embed_stream",
    "embed_tokens",
    "get_library_path",
    "import_gguf",
    "inspect_onnx",
    "inspect_provider",
    "keep_last_logits",
    "make_reranker",
    "optimize_onnx",
    "register",
    "register_provider",
    "rerank",
    "search",
    "session_options",
]

# Names that are imported on first use, because onnx takes a second to load.
_LAZY = {
    "CacheReport": "ortolan.graph_passes.report.optimization",
    "Inspection": "ortolan.inspection",
    "LayerReport": "ortolan.graph_passes.report.optimization",
    "OptimizationReport": "ortolan.graph_passes.report.optimization",
    "OptimizeOptions": "ortolan.optimize_options",
    "OutputDeviation": "ortolan.graph_passes.report.optimization",
    "ProviderInspection": "ortolan.provider_inspection",
    "ProviderNode": "ortolan.provider_inspection",
    "RankedText": "ortolan.embedding",
    "Recipe": "ortolan.graph_passes.recipe",
    "SparseVectors": "ortolan.token_vectors",
    "TextEncoder": "ortolan.text_encoder",
    "TextInput": "ortolan.graph_passes.text.text_plan",
    "Timing": "ortolan.graph_passes.report.figures",
    "TokenVectors": "ortolan.token_vectors",
    "cpu_info": "ortolan.session",
    "create_session": "ortolan.session",
    "embed": "ortolan.embedding",
    "embed_sparse": "ortolan.token_vectors",
    "embed_stream": "ortolan.embedding",
    "embed_tokens": "ortolan.token_vectors",
    "get_library_path": "ortolan.library",
    "import_gguf": "ortolan.importer",
    "inspect_onnx": "ortolan.inspection",
    "inspect_provider": "ortolan.provider_inspection",
    "keep_last_logits": "ortolan.last_logits",
    "make_reranker": "ortolan.reranker",
    "optimize_onnx": "ortolan.optimize",
    "register": "ortolan.session",
    "register_provider": "ortolan.provider",
    "rerank": "ortolan.embedding",
    "search": "ortolan.optimize",
    "session_options": "ortolan.provider",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("ortolan")
    except metadata.PackageNotFoundError:  # the source tree is not installed as a package
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
