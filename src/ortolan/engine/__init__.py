"""Continuous batching: serve many requests at once from one decoder with a paged KV cache."""

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

__all__ = [
    "BLOCK_TOKENS",
    "Engine",
    "EngineClosedError",
    "Grammar",
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
    "TokenLogprobs",
    "TokenSampler",
]
