"""Continuous batching: serve many requests at once from one decoder with a paged KV cache."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .draft_model import DraftModel
from .drafts import Draft, Drafter
from .engine import Engine
from .requests import (
    EngineClosedError,
    Grammar,
    Output,
    QueueFullError,
    Request,
    SamplingOptions,
    TokenLogprobs,
)
from .rows import RowState, Sampled, TokenSampler
from .stats import HistogramData, Stats
from .step import BLOCK_TOKENS, Model, Step
from .stream import Stream

if TYPE_CHECKING:
    from .grammar import GrammarTokenizer, TokenGrammar

_LAZY = {"GrammarTokenizer": ".grammar", "TokenGrammar": ".grammar"}  # few programs need them

__all__ = [
    "BLOCK_TOKENS",
    "Draft",
    "DraftModel",
    "Drafter",
    "Engine",
    "EngineClosedError",
    "Grammar",
    "GrammarTokenizer",
    "HistogramData",
    "Model",
    "Output",
    "QueueFullError",
    "Request",
    "RowState",
    "Sampled",
    "SamplingOptions",
    "Stats",
    "Step",
    "Stream",
    "TokenGrammar",
    "TokenLogprobs",
    "TokenSampler",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
