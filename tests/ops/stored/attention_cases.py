"""Cases of NoMADAttention, with and without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from onnx import TensorProto

from ortolan import _native

from ..attention import bounded_attention
from . import numbers
from .bounds import decode_error, weights_error
from .case import Arrays, Case, bfloat16, one_node

NOTHING = np.zeros(1, np.float32)
SHORT = 4  # in calls of at most this many tokens, the new tokens too are read from the (quantized) cache
LOWEST = np.finfo(np.float32).min


def split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """Convert [B, S, heads D] to [B, heads, S, D]."""
    batch, rows, width = x.shape
    return x.reshape(batch, rows, heads, width // heads).transpose(0, 2, 1, 3)


# Columns: batch, queries, keys, heads, key/value heads, head_dim, causal, packed (query, key and value in one input),
# has a mask.
EXACT = {
    "one": (1, 1, 1, 1, 1, 1, 0, False, False),
    "few": (2, 5, 7, 4, 4, 8, 0, False, True),
    "heads share keys": (1, 17, 33, 6, 2, 36, 1, False, False),
    "packed": (2, 70, 70, 3, 3, 64, 0, True, True),
    "causal": (1, 130, 130, 2, 1, 80, 1, True, False),
    "many keys": (1, 3, 300, 2, 2, 32, 0, False, True),
}


def exact_cases() -> Iterator[Case]:
    for label, (batch, queries, keys, heads, kv_heads, head_dim, causal, packed, masked) in EXACT.items():
        for precision in (32, 16):
            rng = numbers.generator(f"attention {label}")
            # Small queries keep the error bound useful, because it grows exponentially with the scores.
            q = numbers.uniform(rng, (batch, queries, heads * head_dim)) / 8
            k, v = (numbers.uniform(rng, (batch, keys, kv_heads * head_dim)) for _ in range(2))
            feeds: Arrays = {"query": np.concatenate([q, k, v], -1)} if packed else {"query": q, "key": k, "value": v}
            names = ["query", "mask", *([] if packed else ["key", "value"])]
            constants: Arrays = {"mask": NOTHING}
            mask = None
            if masked:
                mask = numbers.uniform(rng, (batch, 1, queries, keys))
                mask[rng.integers(0, 4, mask.shape) == 0] = LOWEST
                mask[rng.integers(0, 9, mask.shape) == 0] = -np.inf
                mask[..., 0] = 0
                feeds["mask"] = mask
                constants = {}
            model = one_node(
                "NoMADAttention", names, constants, feeds, num_heads=heads, kv_num_heads=kv_heads, scale=0.0,
                causal=causal, zero_hidden_rows=0, precision=precision,
            )  # fmt: skip
            group = heads // kv_heads
            parts = split_heads(q, heads), *(split_heads(a, kv_heads).repeat(group, 1) for a in (k, v))
            yield Case(
                f"NoMADAttention {label}, precision {precision}",
                model,
                [feeds],
                frozenset(),
                _exact_error(parts, head_dim**-0.5, mask, causal == 1, precision),
            )


def _exact_error(
    parts: tuple[np.ndarray, ...], scale: float, mask: np.ndarray | None, causal: bool, precision: int
) -> Callable[[], np.ndarray]:
    def error() -> np.ndarray:
        _, bound = bounded_attention(*parts, scale, mask, causal, precision)
        batch, heads, rows, head_dim = bound.shape
        return bound.transpose(0, 2, 1, 3).reshape(batch, rows, heads * head_dim)

    return error


# Columns: kind of the cache, heads, key/value heads, head_dim, d_sub, rotary, tokens of each call, tokens of the prompt
# stored in the model.
CACHED = {
    "float": ("float", 4, 2, 32, 1, True, (7, 1, 1, 3, 40, 1), 0),
    "float, odd heads": ("float", 3, 3, 36, 1, False, (9, 1, 4), 0),
    "codes d1": ("codes", 4, 2, 32, 1, False, (7, 1, 1, 3, 40, 1, 2, 9, 4, 1), 0),
    "codes d1, rotary": ("codes", 4, 1, 64, 1, True, (31, 1, 1, 40, 1), 0),
    "codes d2": ("codes", 3, 3, 80, 2, False, (33, 1, 64, 1, 1), 0),
    "codes d4": ("codes", 6, 2, 48, 4, False, (150, 1, 1, 4), 0),
    "codes d1, many": ("codes", 2, 1, 128, 1, False, (700, 1, 1), 0),
    "codes, float values": ("codes_float", 4, 2, 32, 1, False, (33, 1, 2, 1), 0),
    "codes, prompt": ("codes", 4, 2, 32, 1, False, (5, 1, 1, 3), 45),
    "float, prompt": ("float", 4, 2, 32, 1, False, (5, 1, 1, 3), 45),
}


def cached_cases() -> Iterator[Case]:
    for label in CACHED:
        yield _cached_case(label)


def _cached_case(label: str) -> Case:
    kind, heads, kv_heads, head_dim, d_sub, rotary, tokens, prompt = CACHED[label]
    rng = numbers.generator(f"cached attention {label}")
    codes, int8_values = kind != "float", kind == "codes"
    widths = (head_dim // d_sub // 2 if codes else head_dim, head_dim + 2 if int8_values else head_dim)
    dtypes = (np.uint8 if codes else np.float32, np.uint8 if int8_values else np.float32)
    books = numbers.uniform(rng, (kv_heads, head_dim // d_sub, 16, d_sub))
    constants: Arrays = {"codebooks": books if codes else np.zeros(0, np.float32), "none": NOTHING}
    constants["no_lengths"] = np.zeros(0, np.int32)
    names = ["query", "none", "key", "value", "past_key", "past_value", "codebooks", "no_lengths"]
    if rotary:
        constants |= _rotary_tables(rng, sum(tokens), head_dim)
        names += ["cos", "sin"]
    attributes = {}
    if prompt:
        names += ["none"] * (11 - len(names))
        packed = _packed_prompt(rng, kv_heads, prompt, head_dim)
        constants |= packed
        names += list(packed)
        attributes = {"prompt_tokens": prompt, "prompt_head_dim": head_dim}
    # A small scale spreads the softmax weights over many tokens and keeps the error bound useful.
    scale = head_dim**-0.5 / 4
    calls: list[Arrays] = []
    for count in tokens:
        shapes = {"query": heads, "key": kv_heads, "value": kv_heads}
        calls.append({name: numbers.uniform(rng, (2, count, n * head_dim)) for name, n in shapes.items()})
    for name, width, dtype in zip(("past_key", "past_value"), widths, dtypes, strict=True):
        calls[0][name] = np.zeros((2, kv_heads, 0, width), dtype)
    kinds = [TensorProto.UINT8 if dtype == np.uint8 else TensorProto.FLOAT for dtype in dtypes]
    model = one_node(
        "NoMADAttention", names, constants, calls[0],
        {"y": TensorProto.FLOAT, "present_key": kinds[0], "present_value": kinds[1]},
        num_heads=heads, kv_num_heads=kv_heads, scale=scale, causal=1, zero_hidden_rows=0, precision=32,
        rotary_interleaved=0, **attributes,
    )  # fmt: skip
    everything = {name: np.concatenate([call[name] for call in calls], 1) for name in ("query", "key", "value")}

    def error() -> float:
        q = split_heads(everything["query"], heads) * (2 if rotary else 1)
        k, v = (split_heads(everything[name], kv_heads) for name in ("key", "value"))
        found = decode_error(q, k, v, scale, books if codes else None, int8_values)
        # Products with the prompt's keys and values round queries and softmax weights to bf16.
        return found + (2 * 2.0**-8 * 2 + 2.0**-8 * scale * head_dim * 4 * 2 if prompt else 0.0)

    exact = {"present_key", "present_value"}
    if codes and not prompt:
        # Calls of more tokens compute exact attention over the call's floats, whose bits may differ.
        exact |= {f"call {i}: y" for i, count in enumerate(tokens) if count <= SHORT}
    return Case(
        f"NoMADAttention cache, {label}",
        model,
        calls,
        frozenset(exact),
        error,
        carried={"present_key": "past_key", "present_value": "past_value"},
        scalar_error=weights_error(everything["value"]),
    )


def _rotary_tables(rng: np.random.Generator, positions: int, head_dim: int) -> Arrays:
    """Return random cos and sin tables. Real angles would depend on the C library's cosine."""
    return {name: numbers.uniform(rng, (positions, head_dim // 2)) / 2 for name in ("cos", "sin")}


def _packed_prompt(rng: np.random.Generator, kv_heads: int, tokens: int, head_dim: int) -> Arrays:
    """Pack a random prompt, as one chunk, in the format of ops/nomad_attention/prompt_cache.h."""
    matrices: Arrays = {}
    padded, room = -(-tokens // 16) * 16, -(-tokens // 32) * 32
    keys, values = np.zeros((head_dim, kv_heads, padded)), np.zeros((room, kv_heads, head_dim))
    keys[:, :, :tokens] = numbers.uniform(rng, (head_dim, kv_heads, tokens), 8)
    values[:tokens] = numbers.uniform(rng, (tokens, kv_heads, head_dim), 8)
    for name, matrix in (("key", keys.reshape(head_dim, -1)), ("value", values.reshape(room, -1))):
        matrix[rng.integers(0, 3, matrix.shape) == 0] = 0
        masks, packed, offsets = _native.pack_bitmap(np.ascontiguousarray(matrix, np.float32), dense=name == "value")
        matrices[f"prompt_{name}_masks"] = masks
        matrices[f"prompt_{name}_values"] = bfloat16(packed)
        matrices[f"prompt_{name}_offsets"] = offsets
    return matrices


def cases() -> Iterator[Case]:
    yield from exact_cases()
    yield from cached_cases()
