"""One-node models of PagedNoMADAttention with their pools, and a float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import ortolan

BLOCK = 16
OPERANDS = ("query", "key", "value")
POOLS = ("key_pool", "value_pool")
SCALES = ("key_scales", "value_scales")  # of int8 pools
NAMES = (*OPERANDS, *POOLS, "sequence_starts", "past_lengths", "block_table")
Chunk = tuple[np.ndarray, np.ndarray, np.ndarray]  # query, key and value [tokens, heads, dim]

_RANKS = {"key_pool": 4, "value_pool": 4, "block_table": 2, "cos": 2, "sin": 2}
_RANKS |= dict.fromkeys(SCALES, 3)
_RANKS |= dict.fromkeys(OPERANDS, 3) | dict.fromkeys(("sequence_starts", "past_lengths", "sinks"), 1)


@dataclass
class Node:
    """A session of one node, with pools of `blocks` blocks that calls append to."""

    heads: int
    kv_heads: int
    dim: int
    blocks: int = 64
    rotary: int = 0  # positions of cos and sin
    rotary_dim: int = 0  # elements of a head that are rotated; 0: all
    sinks: bool = False
    packed: bool = False
    by_heads: frozenset[str] = frozenset()  # operands that are [1, heads, tokens, dim]
    threads: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)
    functions: Sequence[onnx.FunctionProto] = ()
    library: bool = True  # False: ONNX Runtime runs the function
    opset: int = 17
    by_tokens: bool = False  # pools have the shape [blocks, 16, kv_heads, dim]
    empty: float = np.nan  # blocks hold NaN, so that reading one that is not the sequence's shows
    int8: bool = False  # the pools are int8, with scales

    def __post_init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        if self.library:
            ortolan.register(options)
        model = self.model().SerializeToString()
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        rng = np.random.default_rng(99)
        shapes = ((self.dim // 4, BLOCK, 4) if self.int8 else (self.dim, BLOCK), (BLOCK, self.dim))
        self.pools = [
            np.full((self.blocks, self.kv_heads, *shape), 85, np.int8)
            if self.int8
            else np.full((self.blocks, self.kv_heads, *shape), self.empty, ml_dtypes.bfloat16)
            for shape in shapes
        ]
        for _ in self.scale_names:
            self.pools.append(np.full((self.blocks, self.kv_heads, BLOCK), self.empty, np.float32))
        angles = rng.uniform(-3, 3, (self.rotary, (self.rotary_dim or self.dim) // 2)).astype(np.float32)
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.sink_scores = rng.normal(size=self.heads).astype(np.float32)

    @property
    def scale_names(self) -> tuple[str, ...]:
        """The inputs with scales of the pools."""
        return SCALES if self.int8 else ()

    def model(self) -> onnx.ModelProto:
        """Return the model; a constant 0 replaces missing inputs before given ones."""
        given = [name for name in NAMES if not self.packed or name not in ("key", "value")]
        given += [*(["cos", "sin"] if self.rotary else []), *(["sinks"] if self.sinks else [])]
        given += self.scale_names
        names = [*NAMES, "cos", "sin", "sinks", *SCALES]
        while names[-1] not in given:
            names.pop()
        inputs = [name if name in given else "no_sinks" if name == "sinks" else "zero" for name in names]
        node = helper.make_node(
            "PagedNoMADAttention",
            inputs,
            ["Y", *(f"new_{name}" for name in (*POOLS, *self.scale_names))],
            "attention",
            domain="ai.ortolan",
            **{"num_heads": self.heads, "kv_num_heads": self.kv_heads, "scale": 0.0, "window": 0}
            | {"rotary_interleaved": 0}
            | self.attributes,
        )
        missing = {"zero": np.zeros(1, np.float32), "no_sinks": np.full(self.heads, -np.inf, np.float32)}
        pool = TensorProto.INT8 if self.int8 else TensorProto.BFLOAT16
        kinds = dict.fromkeys(NAMES[5:], TensorProto.INT64) | dict.fromkeys(POOLS, pool)
        graph = helper.make_graph(
            [node],
            "paged",
            [
                helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), [None] * self._rank(name))
                for name in given
            ],
            [
                helper.make_tensor_value_info("Y", TensorProto.FLOAT, [None] * 3),
                *(
                    helper.make_tensor_value_info(
                        f"new_{name}", kinds.get(name, TensorProto.FLOAT), [None] * self._rank(name)
                    )
                    for name in (*POOLS, *self.scale_names)
                ),
            ],
            [numpy_helper.from_array(array, name) for name, array in missing.items() if name in inputs],
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("ai.ortolan", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(self.functions))

    def _rank(self, name: str) -> int:
        is_in_quads = self.int8 and name == "key_pool" and not self.by_tokens
        return _RANKS[name] + (name in self.by_heads) + is_in_quads

    def feeds(
        self, chunks: Sequence[Chunk], past: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> dict[str, np.ndarray]:
        """Return the inputs of a call, except for the pools."""
        table = np.zeros((len(tables), max(map(len, tables), default=0)), np.int64)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = blocks
        operands = {}
        for i, name in enumerate(OPERANDS):
            none = np.zeros((0, self.kv_heads if i else self.heads, self.dim), np.float32)
            operands[name] = np.concatenate([none, *(chunk[i] for chunk in chunks)])
        if self.packed:
            operands = {"query": np.concatenate(list(operands.values()), axis=1)}
        feeds = {
            name: array.swapaxes(0, 1)[None]
            if name in self.by_heads
            else array.reshape(1, len(array), array.shape[1] * self.dim)
            for name, array in operands.items()
        }
        starts = np.cumsum([0, *(len(chunk[0]) for chunk in chunks)])
        feeds |= {"sequence_starts": starts, "past_lengths": np.array(past, np.int64), "block_table": table}
        if self.rotary:
            feeds |= {"cos": self.cos, "sin": self.sin}
        if self.sinks:
            feeds["sinks"] = self.sink_scores
        return {name: np.ascontiguousarray(array) for name, array in feeds.items()}

    def run(self, chunks: Sequence[Chunk], past: Sequence[int], tables: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Append chunks to their sequences; return their Y [tokens, heads, dim]."""
        feeds = self.feeds(chunks, past, tables)
        y = self.run_feeds(feeds)[0].reshape(-1, self.heads, self.dim)
        return np.split(y, feeds["sequence_starts"][1:-1]) if chunks else []

    def run_feeds(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        """Run a call that appends to the pools in place; return Y."""
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, pool in zip((*POOLS, *self.scale_names), self.pools, strict=True):
            bits = pool if self.int8 else pool.view(np.uint16)
            if self.by_tokens and name in POOLS:
                bits = bits.reshape(self.blocks, BLOCK, self.kv_heads, self.dim)
            kinds = {np.uint16: TensorProto.BFLOAT16, np.int8: TensorProto.INT8, np.float32: TensorProto.FLOAT}
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kinds[bits.dtype.type])
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(f"new_{name}", value)
        binding.bind_output("Y", "cpu")
        self.session.run_with_iobinding(binding)
        y: np.ndarray = binding.get_outputs()[-1].numpy()
        return y


def sequence(node: Node, tokens: int, seed: int = 0) -> Chunk:
    """Return random query, key and value of a sequence."""
    rng = np.random.default_rng(seed)
    shapes = (node.heads, node.kv_heads, node.kv_heads)
    query, key, value = (rng.normal(size=(tokens, heads, node.dim)).astype(np.float32) for heads in shapes)
    return 2 * query, key, value


def blocks_of(tokens: int) -> int:
    """Return the number of blocks of a sequence."""
    return -(-tokens // BLOCK)


def stored(array: np.ndarray, int8: bool = False) -> np.ndarray:
    """Return the array as the pools store it, in float64."""
    if not int8:
        return array.astype(ml_dtypes.bfloat16).astype(np.float64)
    largest = np.abs(array).max(axis=-1, keepdims=True)
    codes = np.rint(array * (np.float32(127) / largest))
    return codes.astype(np.float64) * (largest / np.float32(127)).astype(np.float64)


def rotated(node: Node, array: np.ndarray) -> np.ndarray:
    """Return queries or keys [tokens, heads, dim] of a whole sequence after rotary embedding."""
    if not node.rotary:
        return array
    interleaved = node.attributes.get("rotary_interleaved", 0)
    cos, sin = node.cos[: len(array), None], node.sin[: len(array), None]
    dims = 2 * cos.shape[-1]
    turned, rest = array[..., :dims], array[..., dims:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else np.split(turned, 2, axis=-1)
    parts = a * cos - b * sin, b * cos + a * sin
    turned = np.stack(parts, axis=-1).reshape(turned.shape) if interleaved else np.concatenate(parts, axis=-1)
    return np.concatenate([turned, rest], axis=-1)


def expected(node: Node, tensors: Chunk) -> np.ndarray:
    """Return Y in float64, from keys and values as the pools store them."""
    query, key, value = tensors
    tokens, group = len(query), node.heads // node.kv_heads
    factor = np.float32(node.attributes.get("scale", np.float32(node.dim**-0.5))) * np.float32(1.44269504)
    q = rotated(node, query) * factor
    q = stored(q, int8=True) if node.int8 else q.astype(np.float64)
    k, v = (stored(one, node.int8).repeat(group, axis=1) for one in (rotated(node, key), value))
    scores = np.einsum("thd,jhd->htj", q, k) / np.log2(np.e)
    if cap := node.attributes.get("softcap"):
        scores = cap * np.tanh(scores / cap)
    t, j = np.arange(tokens)[:, None], np.arange(tokens)
    window = node.attributes.get("window", 0) or tokens
    scores = np.where((j > t) | (j <= t - window), -np.inf, scores)
    if node.sinks:
        sinks = np.broadcast_to(node.sink_scores[:, None, None], (node.heads, tokens, 1))
        scores = np.concatenate([scores, sinks.astype(np.float64)], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[:1])])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("htj,jhd->thd", weights, v)
