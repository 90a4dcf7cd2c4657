"""A prompt's keys and values as NoMADAttention's constants: pruned, and packed as ops/nomad_attention/prompt_cache.h."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortolan import _native

from .prune import find_threshold, pruned_tensor
from .replace.replacement import PackedTensor

PROMPT_INPUTS = (
    "prompt_key_masks",
    "prompt_key_values",
    "prompt_key_offsets",
    "prompt_value_masks",
    "prompt_value_values",
    "prompt_value_offsets",
)
_MOST_CHUNK = 512  # tokens
_TILE_INPUTS = 32
_PANEL_COLUMNS = 16


@dataclass(frozen=True, eq=False)
class PromptCache:
    """Of one layer, float32 [kv_heads, tokens, head_dim] of numbers that bfloat16 holds. dense: stored so."""

    keys: np.ndarray
    values: np.ndarray
    dense_keys: bool = False
    dense_values: bool = False

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]

    def pack(self) -> dict[str, PackedTensor]:
        """By the names of PROMPT_INPUTS."""
        packed = (
            *_native.pack_bitmap(_key_matrix(self.keys), dense=self.dense_keys),
            *_native.pack_bitmap(_value_matrix(self.values), dense=self.dense_values),
        )
        dtypes = (ir.DataType.UINT8, ir.DataType.BFLOAT16, ir.DataType.INT64) * 2
        return {
            name: PackedTensor(array, dtype) for name, array, dtype in zip(PROMPT_INPUTS, packed, dtypes, strict=True)
        }


def prune_prompt(keys: np.ndarray, values: np.ndarray, keys_sparsity: float, values_sparsity: float) -> PromptCache:
    """Of a layer's keys and values [kv_heads, tokens, head_dim], the smallest of all heads together become zero.

    sparsity: the share of them; at 0 the storage is dense. Raises ModelError where one is NaN or infinity.
    """
    kept = (_pruned(keys, keys_sparsity, "keys"), _pruned(values, values_sparsity, "values"))
    return PromptCache(*kept, dense_keys=keys_sparsity == 0, dense_values=values_sparsity == 0)


def _pruned(array: np.ndarray, sparsity: float, name: str) -> np.ndarray:
    tensor = ir.tensor(np.ascontiguousarray(array, np.float32))
    threshold = find_threshold([tensor], [f"prompt's {name}"], round(sparsity * array.size))
    return pruned_tensor(tensor, threshold).numpy().astype(ml_dtypes.bfloat16).astype(np.float32)


def chunk_tokens(tokens: int) -> tuple[int, int]:
    """The number of chunks that values are cut into, and the tokens that each of them has room for."""
    chunks = -(-tokens // _MOST_CHUNK)
    return chunks, -(-(-(-tokens // chunks)) // _TILE_INPUTS) * _TILE_INPUTS


def _key_matrix(keys: np.ndarray) -> np.ndarray:
    kv_heads, tokens, head_dim = keys.shape
    padded = np.pad(keys, ((0, 0), (0, -tokens % _PANEL_COLUMNS), (0, 0)))
    return np.ascontiguousarray(padded.transpose(2, 0, 1).reshape(head_dim, -1))


def _value_matrix(values: np.ndarray) -> np.ndarray:
    kv_heads, tokens, head_dim = values.shape
    chunks, size = chunk_tokens(tokens)
    padded = np.pad(values, ((0, 0), (0, chunks * size - tokens), (0, 0)))
    by_chunk = padded.reshape(kv_heads, chunks, size, head_dim)
    return np.ascontiguousarray(by_chunk.transpose(2, 0, 1, 3).reshape(size, -1))
