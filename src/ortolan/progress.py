"""Progress callbacks and stage logging."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

# Level info is for steps and decisions; debug is for details, such as the result for each layer.
logger = logging.getLogger("ortolan")


class Stage(StrEnum):
    """The stages of optimize_onnx, search, embed and others. Benchmarks report the measured case instead."""

    READ_WEIGHTS = "read weights"  # weights of a GGUF file
    NORMALIZE = "normalize"
    FLOAT_ACTIVATIONS = "float activations"
    CALIBRATE = "calibrate"
    SENSITIVITY = "sensitivity"  # sensitivity of layers to pruning
    PRUNE = "prune"
    SCALE = "scale"
    QUANTIZE = "quantize"
    FUSE_ATTENTION = "fuse attention"
    RANGES = "ranges"
    ACTIVATIONS = "activations"
    CACHE_PROMPT = "cache prompt"
    COLLECT_KEYS = "collect keys"
    CODEBOOKS = "codebooks"
    COMPRESS_CACHE = "compress cache"
    FUSE_CACHED_ATTENTION = "fuse cached attention"
    LINEAR_ATTENTION = "linear attention"
    EXPERTS = "experts"
    REPLACE = "replace"
    FUSE_LUT = "fuse tables"
    FUSE_NORM = "fuse norms"
    UNPAD = "unpad"
    WRITE = "write"
    VERIFY = "verify"
    TOKENIZER = "tokenizer"
    SERVE = "form for serving"
    COPY = "copy"
    SAVE = "save"
    # search
    TIME_LAYERS = "search: time layers"
    SENSITIVITIES = "search: sensitivity of outputs"
    LAYER_ERRORS = "search: errors of layers"
    TRY_MODELS = "search: try models"
    TIME_MODELS = "search: time models"
    # Stages of embed, rerank, distill and the demo.
    EMBED = "embed texts"
    SCORE = "score texts"
    DISTILL = "distill"
    TIME = "time models"


Progress = Callable[[str, int, int], None]  # progress(stage, done, total)


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore the progress."""


@contextmanager
def told(progress: Progress) -> Iterator[Progress]:
    """Yield a callback that also logs each new stage.

    If the callback raises an exception, the with statement raises the same exception, even if code inside wraps it in
    another one. So callers can cancel a run.
    """
    raised: list[Exception] = []
    last = ""

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal last
        if stage != last:
            logger.info("%s", stage)
            last = stage
        try:
            progress(stage, done, total)
        except Exception as error:
            raised.append(error)
            raise

    try:
        yield tell
    except Exception:
        if raised:
            raise raised[0] from raised[0].__cause__
        raise
