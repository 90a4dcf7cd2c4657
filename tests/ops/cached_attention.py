"""NoMADAttention with a cache: one-node models, and the expected outputs of consecutive calls in NumPy.

The native appenders write the expected caches; tests/formats compares the appenders with NumPy. Attention over the
caches is computed in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ortolan import _native
from ortolan.graph_passes.operators.prompt_cache import PromptCache
from ortolan.graph_passes.passes.prompt import prune_prompt

from . import decode_attention
from .attention import Floats, assert_attention_close

HIDDEN = -1e8  # a mask value of this or less masks the key
SHORT = 4  # in calls of at most this many tokens, the new tokens too are read from the (quantized) cache
CACHES = ("key", "value", "exact_key")
EXACT_KEY, PROMPT = 10, 11  # indices of inputs
NOTHING = np.zeros(1, np.float32)  # placeholder for a missing mask, key or value


@dataclass(frozen=True)
class Setup:
    """Parameters of a NoMADAttention node with a cache.

    Args:
        kind: content of the cache: float; codes (key codes, int8 values); codes_float (key codes, float values).
        width: bytes per token and head in both caches of kind codes; 0: the bytes that each cache needs.
        precision: bits of the matrix operands in calls of many tokens.
        reproducible: the node has this attribute, so calls of few tokens have that precision too.
        by_heads: names of inputs with shape [B, heads, S, D].
        rotary: half, interleaved or None.
        window: number of recent tokens with exact keys.
        sinks: number of first tokens with exact keys.
        local_window: number of latest keys that a query sees; 0: all.
        head_sink: each head has a further score without a value.
        rotary_dim: elements of a head that are rotated; 0: all.
        prompt: number of tokens stored in the model.
        prompt_sparsity: fractions of zeros in the prompt's keys and values; 0: dense storage.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    kind: str = "float"
    d_sub: int = 1
    packed: bool = False
    rotary: str | None = None
    lengths: bool = True
    causal: bool = True
    scale: float = 0.0
    zero_hidden_rows: bool = False
    mask: bool = False
    by_heads: frozenset[str] = frozenset()
    positions: int = 256
    window: int = 0
    sinks: int = 0
    prompt: int = 0
    prompt_sparsity: tuple[float, float] = (0.3, 0.5)
    width: int = 0
    precision: int = 32
    reproducible: bool = False
    softcap: float = 0.0
    local_window: int = 0
    head_sink: bool = False
    rotary_dim: int = 0

    @property
    def codes(self) -> bool:
        return self.kind != "float"

    @property
    def int8_values(self) -> bool:
        return self.kind == "codes"

    @property
    def rows(self) -> tuple[int, int]:
        """Elements per token in the key cache and in the value cache, without padding."""
        key = self.head_dim // self.d_sub // 2 if self.codes else self.head_dim
        return key, self.head_dim + 2 if self.int8_values else self.head_dim

    @property
    def widths(self) -> tuple[int, int]:
        """Last dimension of the key cache and of the value cache."""
        return (self.width, self.width) if self.width else self.rows

    def row_views(self, kind: int, head: np.ndarray) -> np.ndarray:
        """Return a view [tokens, row] of one head's key cache (kind 0) or value cache (kind 1), [tokens, width].

        Rows are stored without gaps; the padding is at the end of the head.
        """
        row = self.rows[kind]
        return head.reshape(-1)[: len(head) * row].reshape(-1, row)

    @property
    def dtypes(self) -> tuple[type, type]:
        return np.uint8 if self.codes else np.float32, np.uint8 if self.int8_values else np.float32

    @property
    def slots(self) -> int:
        """Number of exact keys."""
        return self.sinks + self.window

    def slot(self, token: int) -> int | None:
        """Return the slot of a token's exact key; None if its key is never exact."""
        if token < self.sinks:
            return token
        return self.sinks + (token - self.sinks) % self.window if self.window else None

    @property
    def caches(self) -> tuple[str, ...]:
        return CACHES if self.slots else CACHES[:2]

    def empty_cache(self, batch: int, tokens: int = 0) -> list[np.ndarray]:
        """Return the caches for keys, values and (if used) exact keys; slots that must not be read hold NaN."""
        cache = [
            np.zeros((batch, self.kv_heads, tokens, width), dtype)
            for width, dtype in zip(self.widths, self.dtypes, strict=True)
        ]
        if self.slots:
            cache.append(np.full((batch, self.kv_heads, self.slots, self.head_dim), np.nan, np.float32))
        return cache

    def codebooks(self) -> Floats:
        """Return random codebooks, [KV, D / d_sub, 16, d_sub]."""
        shape = (self.kv_heads, self.head_dim // self.d_sub, 16, self.d_sub)
        return np.random.default_rng(self.head_dim).standard_normal(shape, dtype=np.float32)

    def prompt_cache(self) -> PromptCache:
        rng = np.random.default_rng(self.prompt)
        shape = (self.kv_heads, self.prompt, self.head_dim)
        if not self.prompt:
            return PromptCache(*np.zeros((2, *shape), np.float32))
        return prune_prompt(*rng.standard_normal((2, *shape), dtype=np.float32), *self.prompt_sparsity)

    def cos_sin(self) -> tuple[Floats, Floats]:
        dims = self.rotary_dim or self.head_dim
        angles = np.arange(self.positions)[:, None] * 10000.0 ** (-np.arange(0, dims, 2) / dims)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def visible(self, queries: int, tokens: int) -> NDArray[np.bool_]:
        """Return whether the last queries of a sequence see its tokens, without masks, [queries, tokens]."""
        if not self.causal:
            return np.ones((queries, tokens), bool)
        seen = np.tri(queries, tokens, tokens - queries, dtype=bool)
        if self.local_window:
            seen &= ~np.tri(queries, tokens, tokens - queries - self.local_window, dtype=bool)
        return seen

    def head_sinks(self) -> Floats | None:
        """Return the sinks [heads]."""
        return np.linspace(-1, 2, self.heads, dtype=np.float32) if self.head_sink else None


def node_model(
    setup: Setup,
    functions: Sequence[onnx.FunctionProto] = (),
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 17,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one NoMADAttention node "attention".

    Inputs are query, mask, key, value, past_* and lengths; outputs are y and present_*. constants: tensors that replace
    the setup's constants or placeholders of omitted inputs.
    """
    cos, sin = setup.cos_sin()
    tensors = {
        "codebooks": setup.codebooks() if setup.codes else np.zeros(0, np.float32),
        "none": NOTHING,
        "no_lengths": np.zeros(0, np.int32),
    }
    names = ["query", "mask" if setup.mask else "none", *(["none"] * 2 if setup.packed else ["key", "value"])]
    names += ["past_key", "past_value", "codebooks", "lengths" if setup.lengths else "no_lengths"]
    if setup.rotary:
        tensors |= {"cos": cos, "sin": sin}
        names += ["cos", "sin"]
    if setup.slots:
        names += [*(["none"] * (EXACT_KEY - len(names))), "past_exact_key"]
        attributes = {"window": setup.window, "sinks": setup.sinks} | attributes
    if setup.prompt:
        names += ["none"] * (PROMPT - len(names))
        attributes = {"prompt_tokens": setup.prompt, "prompt_head_dim": setup.head_dim} | attributes
        for name, packed in setup.prompt_cache().pack().items():
            bf16 = packed.array.dtype == np.uint16
            tensors[name] = packed.array.view(ml_dtypes.bfloat16) if bf16 else packed.array
            names.append(name)
    tensors |= constants or {}
    types = {np.float32: TensorProto.FLOAT, np.uint8: TensorProto.UINT8}
    kinds = dict(zip(("past_key", "past_value"), (types[dtype] for dtype in setup.dtypes), strict=True))
    inputs = [
        helper.make_tensor_value_info(
            name,
            TensorProto.INT32 if name == "lengths" else kinds.get(name, TensorProto.FLOAT),
            # Ranks are not declared, because tests also feed wrong ranks.
            None,
        )
        for name in names
        if name not in tensors
    ]
    node = helper.make_node(
        "NoMADAttention",
        names,
        ["y", *(f"present_{name}" for name in setup.caches)],
        "attention",
        domain="ai.ortolan",
        **{
            "num_heads": setup.heads,
            "kv_num_heads": setup.kv_heads,
            "scale": setup.scale,
            "causal": int(setup.causal),
            "zero_hidden_rows": int(setup.zero_hidden_rows),
            "precision": setup.precision,
            "rotary_interleaved": int(setup.rotary == "interleaved"),
        }
        | ({"softcap": setup.softcap} if setup.softcap else {})
        | ({"reproducible": "everywhere"} if setup.reproducible else {})
        | ({"local_window_size": setup.local_window} if setup.local_window else {})
        | ({"head_sink": setup.head_sinks()} if setup.head_sink else {})
        | attributes,
    )
    outputs = [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in zip(node.output, (TensorProto.FLOAT, *kinds.values(), TensorProto.FLOAT), strict=False)
    ]
    used = [numpy_helper.from_array(array, name) for name, array in tensors.items() if name in names]
    return helper.make_model(
        helper.make_graph([node], "single", inputs, outputs, used),
        functions=list(functions),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )


def gqa_model(setup: Setup) -> onnx.ModelProto:
    """Return a model with ORT's GroupQueryAttention that computes the same; float caches only."""
    names = ["query", *(["", ""] if setup.packed else ["key", "value"]), "past_key", "past_value", "lengths", "total"]
    integers = {"lengths", "total"}
    cos, sin = setup.cos_sin()
    tensors = {"cos": cos, "sin": sin} if setup.rotary else {}
    inputs = [
        helper.make_tensor_value_info(
            name, TensorProto.INT32 if name in integers else TensorProto.FLOAT, [] if name == "total" else None
        )
        for name in names
        if name
    ]
    node = helper.make_node(
        "GroupQueryAttention",
        names + list(tensors),
        ["y", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=setup.heads,
        kv_num_heads=setup.kv_heads,
        do_rotary=int(bool(setup.rotary)),
        rotary_interleaved=int(setup.rotary == "interleaved"),
    )
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    initializers = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    return helper.make_model(
        helper.make_graph([node], "single", inputs, outputs, initializers),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
    )


def rotated(x: Floats, positions: NDArray[np.int64], setup: Setup) -> Floats:
    """Return x [B, heads, S, D] with rotary embedding for positions [B, S]."""
    cos, sin = (table[positions][:, None] for table in setup.cos_sin())
    half = cos.shape[-1]
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    at = pairs if setup.rotary == "interleaved" else (slice(half), slice(half, 2 * half))
    a, b = x[..., at[0]], x[..., at[1]]
    y = x.copy()
    y[..., at[0]], y[..., at[1]] = a * cos - b * sin, b * cos + a * sin
    return y


@dataclass
class Call:
    """Inputs of one call and the expected outputs, with rows grouped by head."""

    setup: Setup
    feeds: dict[str, np.ndarray]
    q: Floats  # [B, heads, S, D], after the rotary embedding
    k: list[Floats]  # one [KV, tokens, D] per sequence: the cached keys after decoding, including the prompt
    v: list[Floats]
    exact_k: list[Floats]  # like k, but before quantization
    past: list[int]
    added: list[int]
    present: list[np.ndarray]

    def keys_of(self, b: int, query: int) -> Floats:
        """Return the keys that a query of sequence b reads, [KV, tokens, D]: exact if stored, otherwise decoded."""
        setup, past = self.setup, self.past[b]
        position = past + query if self.q.shape[2] <= SHORT else past - 1
        token = np.arange(self.k[b].shape[1]) - setup.prompt
        recent = token > position - setup.window if setup.window else token < 0
        return np.where(((token < setup.sinks) | recent)[:, None], self.exact_k[b], self.k[b])

    def check(self, outputs: Sequence[np.ndarray], exact: bool | Sequence[bool] = False) -> None:
        """Check the outputs of a call.

        exact: True (for all or per sequence) if scores must come from decoded keys, as in calls of many tokens; False
        if they may come from the kernels' quantized tables.
        """
        y, *present = outputs
        for given, expected in zip(present, self.present, strict=True):
            assert given.dtype == expected.dtype
            np.testing.assert_array_equal(given, expected)
        setup = self.setup
        batch, _, queries, _ = self.q.shape
        assert y.shape == (batch, queries, setup.heads * setup.head_dim) and y.dtype == np.float32
        by_heads = y.reshape(batch, queries, setup.heads, setup.head_dim).transpose(0, 2, 1, 3)
        for b in range(batch):
            assert np.isfinite(by_heads[b]).all()  # padding too
            if self.added[b]:
                self._check_sequence(b, by_heads[b, :, : self.added[b]], exact if isinstance(exact, bool) else exact[b])

    def _check_sequence(self, b: int, y: Floats, exact: bool) -> None:
        setup, added = self.setup, self.added[b]
        q = self.q[b, :, :added]
        group = setup.heads // setup.kv_heads
        scale, sinks = setup.scale or setup.head_dim**-0.5, setup.head_sinks()
        mask = self.feeds["mask"] if setup.mask else None
        total = setup.prompt + self.present[0].shape[2]
        tokens = setup.prompt + self.past[b] + added
        if mask is not None:
            mask = np.broadcast_to(mask, (len(self.q), setup.heads, self.q.shape[2], total))[b, :, :added, :tokens]
        precision = setup.precision if self.q.shape[2] > SHORT or setup.reproducible else 32
        if exact or self.q.shape[2] > SHORT or setup.reproducible or setup.head_dim % 16:
            whole = np.zeros((setup.heads, added, tokens), np.float32) if mask is None else mask.copy()
            if setup.causal:
                whole[:, ~setup.visible(added, tokens)] = -np.inf
            sees = (whole > HIDDEN).any((0, 2))  # each test checks fully masked rows itself
            v = self.v[b].repeat(group, 0)
            if not setup.slots or self.q.shape[2] > SHORT:
                k = self.keys_of(b, 0).repeat(group, 0)
                assert_attention_close(
                    y[:, sees], q[:, sees], k, v, scale, whole[:, sees], False, precision, setup.softcap, 0, sinks
                )
                return
            for i in np.flatnonzero(sees):
                k, at = self.keys_of(b, i).repeat(group, 0), slice(i, i + 1)
                assert_attention_close(
                    y[:, at], q[:, at], k, v, scale, whole[:, at], False, precision, setup.softcap, 0, sinks
                )
            return
        for kv_head in range(setup.kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for i in range(added):
                visible = setup.visible(added, tokens)[i]
                if mask is not None:
                    assert (mask[heads, i] == mask[kv_head * group, i]).all()
                    visible &= mask[kv_head * group, i] == 0
                keys = self.keys_of(b, i)[kv_head][visible]
                # Kernels use quantized score tables only if some keys are not exact.
                rounded = setup.codes and not np.array_equal(keys, self.exact_k[b][kv_head][visible])
                # If a mask hides part of the prompt, the kernel unpacks the prompt to floats.
                prompt = setup.prompt if visible[: setup.prompt].all() else 0
                case = decode_attention.Case(
                    q[heads, i], scale, keys, self.v[b][kv_head][visible], self.present[0], self.present[1],
                    setup.codebooks()[kv_head] if rounded else None, prompt=prompt, softcap=setup.softcap,
                    sinks=None if sinks is None else sinks[heads],
                )  # fmt: skip
                expected, bound = case.expected()
                error = np.abs(y[heads, i] - expected)
                assert (error <= bound).all(), f"largest error over bound: {np.max(error - bound)}, {error.max()}"


@dataclass
class Decoder:
    """Sequences that grow with each call.

    room: capacity of the cache in tokens, if larger than needed.
    """

    setup: Setup
    batch: int = 2
    seed: int = 0
    room: int = 0
    q_magnitude: float = 0.5
    cache: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._keys = [np.zeros((self.setup.kv_heads, 0, self.setup.head_dim), np.float32)] * self.batch
        self._values = list(self._keys)
        self.cache = self.setup.empty_cache(self.batch, self.room)

    @property
    def tokens(self) -> list[int]:
        return [keys.shape[1] for keys in self._keys]

    def call(self, queries: int, added: Sequence[int] | None = None, mask: np.ndarray | None = None) -> Call:
        """Return the next call.

        added: new tokens of each sequence; fewer than `queries` if padding follows.
        """
        setup, rng = self.setup, self._rng
        added = [queries] * self.batch if added is None else list(added)
        past = self.tokens
        drawn = {
            name: rng.standard_normal((self.batch, heads, queries, setup.head_dim), dtype=np.float32)
            for name, heads in (("query", setup.heads), ("key", setup.kv_heads), ("value", setup.kv_heads))
        }
        drawn["query"] *= np.float32(self.q_magnitude)
        feeds = self._feeds(drawn, past, added, mask)
        q, k, v = drawn.values()
        if setup.rotary:
            positions = setup.prompt + np.array(past, np.int64)[:, None] + np.arange(queries)
            q, k = rotated(q, positions, setup), rotated(k, positions, setup)
        room = self.cache[0].shape[2]
        total = max(room, max((n + queries for n in past), default=0)) if setup.lengths else room + queries
        present = setup.empty_cache(self.batch, total)
        if setup.slots:
            present[2][:] = self.cache[2]
        prompt = setup.prompt_cache()
        prompts = (prompt.keys, prompt.values)
        seen: tuple[list[Floats], list[Floats]] = ([], [])
        for b in range(self.batch):
            self._keys[b] = np.concatenate([self._keys[b], k[b, :, : added[b]]], 1)
            self._values[b] = np.concatenate([self._values[b], v[b, :, : added[b]]], 1)
            n = past[b] + added[b]
            self._append(b, n, present)
            for token in range(past[b], n) if setup.slots else ():
                slot = setup.slot(token)
                if slot is not None:
                    present[2][b, :, slot] = self._keys[b][:, token]
            own = past[b] if queries > SHORT else n
            for kind, (rows, found) in enumerate(zip((self._keys[b], self._values[b]), seen, strict=True)):
                cached = self._cached(kind, b, n, present)
                found.append(np.concatenate([prompts[kind], cached[:, :own], rows[:, own:]], 1))
        self.cache = present
        exact_keys = [np.concatenate([prompt.keys, keys], 1) for keys in self._keys]
        return Call(setup, feeds, q, *seen, exact_keys, past, added, present)

    def _feeds(
        self, drawn: Mapping[str, Floats], past: list[int], added: list[int], mask: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        setup = self.setup
        feeds = {
            name: x
            if name in setup.by_heads
            else x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], x.shape[1] * x.shape[3])
            for name, x in drawn.items()
        }
        if setup.packed:
            feeds = {"query": np.concatenate(list(feeds.values()), -1)}
        feeds |= {f"past_{name}": cache for name, cache in zip(setup.caches, self.cache, strict=True)}
        if setup.lengths:
            feeds["lengths"] = np.array(
                [setup.prompt + n + more - 1 for n, more in zip(past, added, strict=True)], np.int32
            )
        return feeds | ({"mask": mask} if mask is not None else {})

    def _append(self, b: int, tokens: int, present: list[np.ndarray]) -> None:
        for head in range(self.setup.kv_heads):
            keys, values = self._keys[b][head], self._values[b][head]
            key_rows, value_rows = (self.setup.row_views(kind, present[kind][b, head]) for kind in range(2))
            if self.setup.codes:
                _native.append_keys(key_rows, 0, keys, self.setup.codebooks()[head])
            else:
                key_rows[:tokens] = keys
            if self.setup.int8_values:
                _native.append_values(value_rows, 0, values)
            else:
                value_rows[:tokens] = values

    def _cached(self, kind: int, b: int, tokens: int, present: list[np.ndarray]) -> Floats:
        """Return the decoded key cache (kind 0) or value cache (kind 1) of sequence b, [KV, tokens, D]."""
        rows = np.stack([self.setup.row_views(kind, head) for head in present[kind][b]])
        if kind == 0 and self.setup.codes:
            books = self.setup.codebooks()
            return np.stack([_native.decode_keys(row, tokens, book) for row, book in zip(rows, books, strict=True)])
        if kind == 1 and self.setup.int8_values:
            return np.stack([_native.decode_values(row, tokens) for row in rows])
        return rows[:, :tokens]


def run_shared(session: ort.InferenceSession, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run with the present caches bound to the memory of the past caches."""
    binding = session.io_binding()
    shared = {
        name: ort.OrtValue.ortvalue_from_numpy(feeds[f"past_{name}"].copy())
        for name in CACHES
        if f"past_{name}" in feeds
    }
    for name, array in feeds.items():
        if not name.startswith("past_"):
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
    for name, value in shared.items():
        binding.bind_ortvalue_input(f"past_{name}", value)
        binding.bind_ortvalue_output(f"present_{name}", value)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    y = binding.copy_outputs_to_cpu()[-1]  # bound last
    return [y, *(value.numpy().copy() for value in shared.values())]


def declare_ranks(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
    """Declare named dimensions for the model's inputs and outputs, as ONNX's checker requires."""
    ranks = {name: array.ndim for name, array in feeds.items()}
    for value in (*model.graph.input, *model.graph.output):
        rank = ranks.get(value.name, 3 if value.name == "y" else 4)
        value.CopyFrom(
            helper.make_tensor_value_info(
                value.name, value.type.tensor_type.elem_type, [f"{value.name}{axis}" for axis in range(rank)]
            )
        )
