"""Continuous batching: serve many requests at once from one decoder with a paged KV cache."""

from .requests import (
    EngineClosedError,
    Grammar,
    Output,
    QueueFullError,
    Request,
    SamplingOptions,
    TokenLogprobs,
)
from .rows import RowState, Sampled, Sampler
from .step import BLOCK_TOKENS, Model, Step

__all__ = [
    "BLOCK_TOKENS",
    "EngineClosedError",
    "Grammar",
    "Model",
    "Output",
    "QueueFullError",
    "Request",
    "RowState",
    "Sampled",
    "Sampler",
    "SamplingOptions",
    "Step",
    "TokenLogprobs",
]
