"""A prompt's keys and values as pruned and packed constants of NoMADAttention (ops/nomad_attention/prompt_cache.h)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortolan import _native

from .replacement import PackedTensor

PROMPT_INPUTS = (
    "prompt_key_masks",
    "prompt_key_values",
    "prompt_key_offsets",
    "prompt_value_masks",
    "prompt_value_values",
    "prompt_value_offsets",
)
# These constants equal those of ops/nomad_attention/prompt_cache.h.
MAX_CHUNK = 512  # largest number of tokens in a chunk
TILE_INPUTS = 32
_PANEL_COLUMNS = 16


@dataclass(frozen=True, eq=False)
class PromptCache:
    """Keys and values of one layer, float32 [kv_heads, tokens, head_dim], exact in bfloat16."""

    keys: np.ndarray
    values: np.ndarray
    dense_keys: bool = False
    dense_values: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt."""
        return int(self.keys.shape[1])

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return int(self.keys.shape[2])

    def pack(self) -> dict[str, PackedTensor]:
        """Return the packed tensors, by the names of PROMPT_INPUTS."""
        packed: tuple[np.ndarray, ...] = (
            *_native.pack_bitmap(_key_matrix(self.keys), dense=self.dense_keys),
            *_native.pack_bitmap(_value_matrix(self.values), dense=self.dense_values),
        )
        dtypes = (ir.DataType.UINT8, ir.DataType.BFLOAT16, ir.DataType.INT64) * 2
        return {
            name: PackedTensor(array, dtype) for name, array, dtype in zip(PROMPT_INPUTS, packed, dtypes, strict=True)
        }


def chunk_tokens(tokens: int) -> tuple[int, int]:
    """Return the number of chunks that values are split into, and the padded tokens of each chunk."""
    chunks = -(-tokens // MAX_CHUNK)
    longest = -(-tokens // chunks)
    return chunks, -(-longest // TILE_INPUTS) * TILE_INPUTS


def _key_matrix(keys: np.ndarray) -> np.ndarray:
    tokens, head_dim = keys.shape[1:]
    padded = np.pad(keys, ((0, 0), (0, -tokens % _PANEL_COLUMNS), (0, 0)))
    return np.ascontiguousarray(padded.transpose(2, 0, 1).reshape(head_dim, -1))


def _value_matrix(values: np.ndarray) -> np.ndarray:
    kv_heads, tokens, head_dim = values.shape
    chunks, size = chunk_tokens(tokens)
    padded = np.pad(values, ((0, 0), (0, chunks * size - tokens), (0, 0)))
    by_chunk = padded.reshape(kv_heads, chunks, size, head_dim)
    return np.ascontiguousarray(by_chunk.transpose(2, 0, 1, 3).reshape(size, -1))
