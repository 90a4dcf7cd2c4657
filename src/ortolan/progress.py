"""How long work tells how far it is: to a callback, and, when a stage begins, to the logger "ortolan"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

# info: what is done and decided. debug: details of it, such as what becomes of each layer.
logger = logging.getLogger("ortolan")


class Stage(StrEnum):
    """What optimize_onnx, search, embed and others are at. A benchmark tells the case that it measures instead."""

    READ_WEIGHTS = "read weights"  # of a GGUF file
    NORMALIZE = "normalize"
    FLOAT_ACTIVATIONS = "float activations"
    CALIBRATE = "calibrate"
    SENSITIVITY = "sensitivity"  # of layers to pruning
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
    REPLACE = "replace"
    FUSE_LUT = "fuse tables"
    FUSE_NORM = "fuse norms"
    UNPAD = "unpad"
    WRITE = "write"
    VERIFY = "verify"
    TOKENIZER = "tokenizer"
    COPY = "copy"
    SAVE = "save"
    # Of the search.
    TIME_LAYERS = "search: times of layers"
    SENSITIVITIES = "search: what errors matter"
    LAYER_ERRORS = "search: errors of layers"
    TRY_MODELS = "search: whole models"
    TIME_MODELS = "search: times of models"
    # Of embed, rerank, distill and the demo.
    EMBED = "embed texts"
    SCORE = "score texts"
    DISTILL = "distill"
    TIME = "time the models"


Progress = Callable[[str, int, int], None]  # progress(stage, done, total)


def no_progress(stage: str, done: int, total: int) -> None:
    """Tells nobody."""


@contextmanager
def told(progress: Progress) -> Iterator[Progress]:
    """The same callback, and the logger is told of each new stage; what the callback raises leaves the block as it is,
    whatever wraps it inside: callers cancel so."""
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
