"""Runs decoders in the form for serving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ortolan.engine.model import CacheType, PagedModel
from ortolan.engine.step import Step

Chunk = tuple[Sequence[int], int, Sequence[int]]  # tokens, past tokens, blocks of the sequence


def step_of(*chunks: Chunk) -> Step:
    """Return a step of chunks that asks for all logits."""
    lengths = [len(tokens) for tokens, _, _ in chunks]
    columns = max((len(blocks) for _, _, blocks in chunks), default=1)
    table = [[*blocks, *[0] * (columns - len(blocks))] for _, _, blocks in chunks]
    positions = [past + i for tokens, past, _ in chunks for i in range(len(tokens))]
    ids = [token for tokens, _, _ in chunks for token in tokens]
    arrays = ids, positions, np.cumsum([0, *lengths]), [past for _, past, _ in chunks], table, range(len(ids))
    return Step(*(np.ascontiguousarray(one, np.int64) for one in arrays))


def run(model: PagedModel, *chunks: Chunk) -> np.ndarray:
    """Return the logits of all tokens."""
    return model.run(step_of(*chunks))


def open_model(path: Path, threads: int = 1, blocks: int = 40, cache_type: CacheType = "bfloat16") -> PagedModel:
    """Open a model whose pools have this number of blocks."""
    return PagedModel.open(path, threads=threads, blocks=blocks, cache_type=cache_type)
