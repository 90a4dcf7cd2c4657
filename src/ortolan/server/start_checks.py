"""Checks of a server's options before it opens a model, because converting a model takes minutes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ortolan.graph_passes.measure.machine import usable_memory
from ortolan.graph_passes.report.figures import human_bytes

from ..cache_folder import default_cache_dir
from ..engine import BLOCK_TOKENS
from ..engine.model import check_cache_type
from ..errors import ArgumentError, ModelError, OrtolanError, missing_model
from .chat import read_template_file
from .draft_check import check_same_tokens
from .model_folder import check_tool_family

if TYPE_CHECKING:
    from ..engine.model import CacheType
    from .run import ServeOptions

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+")
_THREADS_PER_CPU = 4  # more only slow a model down, and thousands cannot be started
_SHARE_OF_MEMORY = 4  # the default cache has 1 / this of the memory, as in PagedModel
_BF16_BYTES, _INT8_BYTES, _SCALE_BYTES = 2, 1, 4


def check_server_options(options: ServeOptions) -> None:
    """Check the options that only a server has.

    Raises:
        OrtolanError: An option is wrong.
    """
    _check_key(os.environ.get("ORTOLAN_API_KEY") or None if options.api_key is None else options.api_key)
    _check_origins(options.allow_origins)
    if not 0 < options.limits.seconds < math.inf:
        raise ArgumentError(f"max-seconds is {options.limits.seconds:g}, expected a finite number above 0")
    if options.encoder is not None:
        _check_encoder(options.encoder)


def check_engine_options(model: Path, options: ServeOptions) -> None:
    """Check how a model is to be opened.

    Raises:
        OrtolanError: An option is wrong.
    """
    check_tool_family(options.tool_calls)
    check_cache_type(options.cache_type)
    if options.chat_template is not None:
        read_template_file(options.chat_template)
    _check_numbers(options)
    _check_sizes(model, options)
    if options.draft_model is not None:
        if options.speculate == "off":
            raise ArgumentError("speculate is off, but there is a draft model: remove --speculate or --draft-model")
        check_same_tokens(model, options.draft_model)


def _check_key(key: str | None) -> None:
    if key is not None and (not key or key != key.strip() or not key.isprintable()):
        what = "empty" if not key.strip() else "surrounded by spaces, or has control characters"
        raise ArgumentError(f"the API key is {what}, expected printable characters; to need no key, leave it out")


def _check_origins(origins: Iterable[str]) -> None:
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ArgumentError(
                f"the allowed origin is {origin!r}, expected scheme://host or scheme://host:port in lower case and "
                "without a path, such as http://localhost:3000, or *"
            )


def _check_numbers(options: ServeOptions) -> None:
    cpus = os.cpu_count() or 1
    if options.threads is not None and not 1 <= options.threads <= _THREADS_PER_CPU * cpus:
        raise ArgumentError(
            f"threads is {options.threads}, expected 1 to {_THREADS_PER_CPU * cpus}, since there are {cpus} CPUs; the "
            "default is the fastest for one request at a time"
        )
    least = max(options.max_sequences, BLOCK_TOKENS)
    if options.max_step_tokens < least:
        raise ArgumentError(
            f"max-step-tokens is {options.max_step_tokens}, expected at least {least}: a token of each answer that "
            f"runs (max-sequences is {options.max_sequences}), and a block of {BLOCK_TOKENS}"
        )
    memory = usable_memory()
    if options.cache_bytes is not None and options.cache_bytes > memory:
        raise ArgumentError(
            f"cache memory is {options.cache_bytes:,} bytes, expected less than the memory of this machine or "
            f"container, {memory:,} bytes ({human_bytes(memory)}); give a smaller --cache-memory"
        )


def _check_encoder(path: Path) -> None:
    from .conversion import model_kind

    if not path.exists():
        raise ModelError(missing_model(path))
    if model_kind(path) != "encoder":
        raise OrtolanError(
            f"{str(path)!r} is a decoder, expected an embedding model or a reranker for --encoder; give the decoder as "
            "the first argument"
        )


def _check_sizes(model: Path, options: ServeOptions) -> None:
    """Check context and cache against the facts in the model's files."""
    if (options.context is None and options.cache_bytes is None) or not model.exists():
        return
    limit, block_bytes = _facts(model, options.cache_type)
    if options.context is not None and limit is not None and not 1 <= options.context <= limit:
        raise ArgumentError(f"context is {options.context}, expected 1 to the model's {limit} tokens")
    cache = usable_memory() // _SHARE_OF_MEMORY if options.cache_bytes is None else options.cache_bytes
    tokens = options.context or 1
    needed = -(-tokens // BLOCK_TOKENS) * block_bytes
    if cache < needed:
        raise ArgumentError(
            f"the cache has {cache:,} bytes, but a sequence of {tokens} tokens needs {needed:,} bytes; give more cache "
            "memory (--cache-memory) or a shorter context"
        )


def _facts(model: Path, cache_type: CacheType) -> tuple[int | None, int]:
    """Return a decoder's most tokens, and the bytes of a block of its cache; None and 0 if they are not known."""
    from ortolan.graph_passes.find.positions import count_positions
    from ortolan.graph_passes.names import CONTEXT_KEY

    from .conversion import graph_kind, load_graph, target_folder

    if model.suffix == ".gguf" and model.is_file():
        converted = target_folder(model, default_cache_dir())
        if converted.is_dir():  # which is faster to read
            return _facts(converted, cache_type)
        from ..models.gguf.model import read_model

        config = read_model(model).config
        heads = config.num_hidden_layers * config.num_key_value_heads
        size = config.head_size
        head_bytes = size * _INT8_BYTES + _SCALE_BYTES if cache_type == "int8" else size * _BF16_BYTES
        return config.max_position_embeddings, 2 * heads * head_bytes * BLOCK_TOKENS
    if not model.is_dir() or graph_kind(loaded := load_graph(model)) == "encoder":
        return None, 0
    said = loaded.metadata_props.get(CONTEXT_KEY)
    return (int(said) if said is not None and said.isdecimal() else count_positions(loaded.graph)), 0
