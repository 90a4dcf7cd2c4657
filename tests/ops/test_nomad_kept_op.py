"""Test PackedNoMADAttention, whose inputs are sequences packed without padding.

Compared with NumPy, its ONNX function, and NoMADAttention of the padded sequences; also tested on invalid input.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from ortolan.graph_passes.operators.nomad_attention_function import PACKED_INPUTS, Uses

from ..sampling import examples
from .attention import LOWEST, Floats, assert_attention_close
from .attention_node import node_model
from .isa_process import check_with_isa, each_isa
from .packed_tokens import packed, random_kept
from .single_node import session

NODE = "PackedNoMADAttention node 'attention'"


class Case:
    """Random padded sequences, and a check of the output for their packed tokens."""

    def __init__(
        self, seed: int, batch=3, tokens=9, heads=4, kv_heads=4, head_dim=8, mask=None, kept=None, density=0.7
    ) -> None:
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.kept = random_kept(rng, batch, tokens, density) if kept is None else np.array(kept, np.int64)
        batch, tokens = self.kept.shape
        widths = {"query": heads, "key": kv_heads, "value": kv_heads}
        self.padded: dict[str, Floats] = {
            name: rng.standard_normal((batch, tokens, count * head_dim), dtype=np.float32)
            for name, count in widths.items()
        }
        self.mask = None
        if mask is not None:
            self.mask = np.array(rng.standard_normal(mask), np.float32)

    def feeds(self, joined: bool = False, by_heads: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Return the inputs for packed sequences.

        joined: query also contains keys and values. by_heads: names of inputs with shape [1, heads, tokens, width].
        """
        rows = {name: packed(self.kept, x) for name, x in self.padded.items()}
        for name in by_heads:
            _, count, width = rows[name].shape
            split = rows[name].reshape(1, count, width // self.head_dim, self.head_dim)
            rows[name] = np.ascontiguousarray(split.transpose(0, 2, 1, 3))
        if joined:
            rows = {"query": np.concatenate(list(rows.values()), -1)}
        masks = {} if self.mask is None else {"mask": self.mask}
        return rows | masks | {"kept": self.kept}

    def full_mask(self) -> Floats | None:
        if self.mask is None:
            return None
        batch, tokens = self.kept.shape
        return np.broadcast_to(self.mask, (batch, self.heads, tokens, tokens))

    def check(self, y: Floats, scale: float | None = None, causal: bool = False, precision: int = 32) -> None:
        """Check that each sequence's rows are attention over the tokens of that sequence only."""
        assert y.shape == (1, np.count_nonzero(self.kept), self.heads * self.head_dim) and y.dtype == np.float32
        scale = self.head_dim**-0.5 if scale is None else scale
        mask, begin = self.full_mask(), 0
        for b, there in enumerate(self.kept != 0):
            count = int(there.sum())
            if count == 0:
                continue
            own = {name: x[b, there].reshape(count, -1, self.head_dim) for name, x in self.padded.items()}
            q, k, v = (x.repeat(self.heads // x.shape[1], 1).transpose(1, 0, 2) for x in own.values())
            found = y[0, begin : begin + count].reshape(count, self.heads, self.head_dim).transpose(1, 0, 2)
            begin += count
            seen = None if mask is None else mask[b][:, there][:, :, there]
            unseen = self.kept[b, there] < 0
            if unseen.any():
                seen = np.zeros((self.heads, count, count), np.float32) if seen is None else seen.copy()
                seen[:, :, unseen] = -np.inf
                # A query that sees no key weighs all keys before it equally, as with q = 0.
                blind = [unseen[: i + 1 if causal else None].all() for i in range(count)]
                q = np.where(np.array(blind)[:, None], np.float32(0), q)
                seen[:, blind] = 0
            assert_attention_close(found, q, k, v, scale, seen, causal, precision)


def kept_model(case: Case, joined: bool = False, **options: Any) -> onnx.ModelProto:
    rank = 0 if case.mask is None else case.mask.ndim
    return node_model(case.heads, case.kv_heads, joined, case.mask is not None, kept=True, mask_rank=rank, **options)


def padded_model(case: Case, **options: Any) -> onnx.ModelProto:
    return node_model(case.heads, case.kv_heads, False, True, **options)


def runs(model: onnx.ModelProto, feeds: dict[str, np.ndarray], threads: int = 1) -> list[Floats]:
    """Return the output of the kernel and that of the ONNX function."""
    onnx.checker.check_model(model)
    return [session(model, library=library, threads=threads).run(None, feeds)[0] for library in (True, False)]


MASKS = [
    None,
    (),
    (1,),
    (9,),
    (9, 9),
    (9, 1),
    (4, 9, 9),
    (3, 1, 1, 9),
    (3, 4, 1, 9),
    (1, 4, 9, 9),
    (3, 4, 9, 9),
    (3, 1, 9, 9),
    (1, 4, 9, 1),
    (3, 4, 9, 1),
    (3, 4, 1, 1),
    (3, 1, 1, 1),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
def test_kernel_and_function_body_agree(mask: tuple[int, ...] | None, kv_heads: int, joined: bool, causal: int) -> None:
    """Sequences without padding; with padding at the end, at the start and between tokens; and empty ones."""
    kept = np.ones((3, 9), np.int64)
    for row in ([0, 0, 1, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1], [0] * 9):
        kept[1] = row
        case = Case(kv_heads, kv_heads=kv_heads, mask=mask, kept=kept)
        for y in runs(kept_model(case, joined, causal=causal), case.feeds(joined)):
            case.check(y, causal=bool(causal))


@pytest.mark.parametrize("mask", [None, (9, 9), (4, 9, 9), (3, 1, 1, 9), (3, 4, 9, 1), (3, 4, 9, 9)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("precision", [32, 16])
def test_tokens_that_no_query_sees(mask: tuple[int, ...] | None, kv_heads: int, causal: int, precision: int) -> None:
    """Negative values in `kept` mark tokens that are computed, but that no query sees."""
    kept = [[1, 1, 1, 1, 1, 1, -1, -1, -1], [0, 1, -1, 1, 0, 1, -7, -1, 1], [1, 0, 1, -1, 0, 1, 1, 1, 0]]
    case = Case(kv_heads, kv_heads=kv_heads, mask=mask, kept=kept)
    for y in runs(kept_model(case, causal=causal, precision=precision), case.feeds()):
        case.check(y, causal=bool(causal), precision=precision)


def test_a_sequence_in_which_no_query_sees_a_token() -> None:
    """All tokens of the sequence have equal weight."""
    case = Case(1, kept=[[-1, 0, -1, -1], [0, 0, 0, 0]])
    for y in runs(kept_model(case), case.feeds()):
        mean = packed(case.kept, case.padded["value"]).mean(axis=1, keepdims=True)
        np.testing.assert_allclose(y, np.broadcast_to(mean, y.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", [32, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_other_tokens_keep_their_bits(precision: int, bias: bool) -> None:
    """Tokens that no query sees do not change a bit of other tokens, in the same sequence or others."""
    mask = (1, 4, 90, 90) if bias else None
    kept = np.array([[1] * 70 + [-1] * 20, [1] * 90, [1] * 30 + [-1] * 5 + [0] * 55])
    case = Case(5, tokens=90, head_dim=16, mask=mask, kept=kept)
    model = kept_model(case, precision=precision)
    (y,) = session(model, threads=2).run(None, case.feeds())
    case.kept = np.maximum(kept, 0)
    (others,) = session(model).run(None, case.feeds())
    np.testing.assert_array_equal(y[:, kept[kept != 0] > 0], others)


BY_HEADS = [("query",), ("query", "key"), ("value",), ("query", "key", "value")]


@pytest.mark.parametrize("by_heads", BY_HEADS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("density", [0.7, 0.0])
def test_operands_by_heads(by_heads: tuple[str, ...], kv_heads: int, causal: int, density: float) -> None:
    """Inputs of shape [1, heads, tokens, width] give the bits of plain inputs, in kernel and function."""
    case = Case(kv_heads, kv_heads=kv_heads, mask=(3, 4, 9, 9), density=density)
    model = kept_model(case, causal=causal, by_heads=by_heads)
    found = runs(model, case.feeds(by_heads=by_heads))
    for y in found:
        case.check(y, causal=bool(causal))
    by_rows = runs(kept_model(case, causal=causal), case.feeds())
    np.testing.assert_array_equal(found[0], by_rows[0])
    names = frozenset(("query", "key", "value"))
    uses = Uses(grouped=kv_heads != 4, causal=bool(causal), kept=True, by_heads=frozenset(by_heads), by_rows=names)
    of_both = kept_model(case, causal=causal, by_heads=by_heads, uses=uses)
    np.testing.assert_allclose(runs(of_both, case.feeds(by_heads=by_heads))[1], found[1], atol=1e-6)
    rows_of_both = kept_model(case, causal=causal, uses=replace(uses, by_heads=names))
    np.testing.assert_allclose(runs(rows_of_both, case.feeds())[1], by_rows[1], atol=1e-6)


@examples(100)
@given(
    batch=st.integers(0, 4),
    tokens=st.integers(0, 90),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    axes=st.none() | st.lists(st.booleans(), max_size=4),
    causal=st.booleans(),
    form=st.sampled_from(["by rows", "joined", "by heads"]),
    scale=st.sampled_from([0.0, 0.3, -0.2]),
    density=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(batch, tokens, kv_heads, group, head_dim, axes, causal, form, scale, density, seed) -> None:
    heads = kv_heads * group
    mask = None
    if axes is not None:
        sizes = [batch, heads, tokens, tokens][4 - len(axes) :]
        mask = [size if whole else 1 for size, whole in zip(sizes, axes, strict=True)]
    case = Case(seed, batch, tokens, heads, kv_heads, head_dim, mask, density=density)
    joined, by_heads = form == "joined", ("query", "key", "value") if form == "by heads" else ()
    model = kept_model(case, joined, causal=int(causal), scale=scale, by_heads=by_heads)
    feeds = case.feeds(joined, by_heads)
    if batch * tokens == 0 and group > 1:  # ONNX's Reshape in the function reads 0 as "copy the input's size"
        case.check(session(model, threads=2).run(None, feeds)[0], scale or None, causal)
        return
    for y in runs(model, feeds, threads=2):
        case.check(y, scale or None, causal)


@pytest.mark.parametrize(
    "kept", [[[0, 0, 0]], [[0, 0, 0], [0, 0, 0]], np.ones((0, 3)), np.ones((2, 0)), np.ones((0, 0))]
)
@pytest.mark.parametrize("mask", [None, (1, 1, 1, 1)])
def test_no_tokens(kept: Any, mask: tuple[int, ...] | None) -> None:
    case = Case(0, mask=mask, kept=kept)
    for joined in (False, True):
        for y in runs(kept_model(case, joined), case.feeds(joined)):
            assert y.shape == (1, 0, 32)


@pytest.mark.parametrize("zero", [0, 1])
def test_rows_that_see_no_key(zero: int) -> None:
    """Fully masked queries give NaN, or zeros if `zero_hidden_rows` is set; other queries are unchanged."""
    kept = [[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1, 0]]
    case = Case(0, kept=kept, mask=(2, 1, 7, 7))
    model = kept_model(case, zero_hidden_rows=zero)
    before = runs(model, case.feeds())
    case.mask[:, :, 3] = -np.inf
    case.mask[:, :, :, [5, 6]] = 0  # keys of padding
    case.mask[1, :, 3, [0, 2]] = 0
    case.mask[1, :, 3, 5] = -np.inf
    after = runs(model, case.feeds())
    for plain, y in zip(before, after, strict=True):
        wanted = 0 if zero else np.nan
        np.testing.assert_array_equal(y[0, [3, 6]], np.full((2, 32), wanted, np.float32))
        np.testing.assert_array_equal(y[0, :3], plain[0, :3])


def test_what_is_not_there_plays_no_part() -> None:
    """Mask values at the positions of padding do not matter."""
    kept = [[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]]
    case = Case(1, kept=kept, mask=(3, 4, 5, 5))
    model = kept_model(case)
    plain = runs(model, case.feeds())
    there = (case.kept != 0)[:, None, :, None] & (case.kept != 0)[:, None, None, :]
    case.mask[~np.broadcast_to(there, case.mask.shape)] = np.nan
    (y,) = session(model).run(None, case.feeds())
    np.testing.assert_array_equal(y, plain[0])


@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23])
@pytest.mark.parametrize("joined", [False, True])
def test_function_body_serves_every_opset_and_evaluator(opset: int, joined: bool) -> None:
    case = Case(opset, kv_heads=2, mask=(3, 1, 9, 9))
    model = kept_model(case, joined, opset=opset)
    for y in (*runs(model, case.feeds(joined)), ReferenceEvaluator(model).run(None, case.feeds(joined))[0]):
        case.check(y)


@pytest.mark.parametrize("mask", [None, (3, 1, 1, 150), (3, 4, 150, 150)])
def test_precision_of_16_bits(mask: tuple[int, ...] | None) -> None:
    case = Case(3, tokens=150, head_dim=32, mask=mask)
    (y,) = session(kept_model(case, precision=16)).run(None, case.feeds())
    case.check(y, precision=16)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_long_sequences(threads: int) -> None:
    """Enough work for several threads: few long sequences, or many short ones, some without tokens."""
    for sizes in (
        {"batch": 1, "tokens": 700, "heads": 2, "kv_heads": 1, "head_dim": 64},
        {"batch": 3, "tokens": 300, "heads": 6, "kv_heads": 2, "head_dim": 32, "mask": (3, 1, 300, 300)},
        {"batch": 200, "tokens": 12, "density": 0.2},
    ):
        case = Case(9, **sizes)
        (y,) = session(kept_model(case), threads=threads).run(None, case.feeds())
        case.check(y)


def check_same_bits(
    lengths: list[int],
    room: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    causal: bool = False,
    precision: int = 32,
    bias: bool = False,
    seed: int = 0,
) -> None:
    """Sequences give the same bits alone and in a batch, for any threads and padding.

    NoMADAttention on the padded sequences also gives these bits.
    """
    batch, tokens = len(lengths), max(lengths) + room
    kept = (np.arange(tokens) < np.array(lengths)[:, None]).astype(np.int64)
    case = Case(seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kept=kept)
    own_mask = np.random.default_rng(seed).standard_normal((heads, tokens, tokens), dtype=np.float32)
    own_mask *= bias
    case.mask = np.broadcast_to(own_mask, (batch, heads, tokens, tokens)).copy()
    options = {"causal": int(causal), "precision": precision}
    ours = [session(kept_model(case, **options), threads=threads) for threads in (1, 2)]
    y = ours[0].run(None, case.feeds())[0]
    np.testing.assert_array_equal(ours[1].run(None, case.feeds())[0], y)

    padding = np.where(kept[:, None, None] != 0, 0, LOWEST)
    hidden = np.where(padding == 0, case.mask, padding).astype(np.float32)
    padded = session(padded_model(case, **options), threads=2).run(None, case.padded | {"mask": hidden})[0]
    np.testing.assert_array_equal(packed(kept, padded), y)

    begin = 0
    in_front = Case(seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kept=kept[:, ::-1])
    in_front.mask = np.zeros_like(case.mask)
    for b, length in enumerate(lengths):
        alone = Case(seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kept=np.ones((1, length)))
        alone.padded = {name: x[b : b + 1, :length] for name, x in case.padded.items()}
        alone.mask = case.mask[b : b + 1, :, :length, :length].copy()
        rows = y[:, begin : begin + length]
        begin += length
        np.testing.assert_array_equal(ours[1].run(None, alone.feeds())[0], rows)
        if length:
            unpadded = session(padded_model(case, **options)).run(None, alone.padded | {"mask": alone.mask})[0]
            np.testing.assert_array_equal(unpadded, rows)
        for name, x in in_front.padded.items():
            x[b, tokens - length :] = case.padded[name][b, :length]
        in_front.mask[b, :, tokens - length :, tokens - length :] = alone.mask[0]
    np.testing.assert_array_equal(ours[1].run(None, in_front.feeds())[0], y)

    # Padding may also be between the tokens, with arbitrary mask values.
    spread = np.random.default_rng(seed).permuted(kept, axis=1)
    with_gaps = Case(seed, heads=heads, kv_heads=kv_heads, head_dim=head_dim, kept=spread)
    with_gaps.mask = np.full_like(case.mask, 7)
    for b, length in enumerate(lengths):
        places = np.flatnonzero(spread[b])
        for name, x in with_gaps.padded.items():
            x[b, places] = case.padded[name][b, :length]
        with_gaps.mask[b][:, places[:, None], places] = case.mask[b, :, :length, :length]
    np.testing.assert_array_equal(ours[0].run(None, with_gaps.feeds())[0], y)


@examples(60)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    room=st.integers(0, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    causal=st.booleans(),
    precision=st.sampled_from([32, 16]),
    bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_sequence_is_answered_alike_alone_padded_and_packed(
    lengths, room, kv_heads, group, head_dim, causal, precision, bias, seed
) -> None:
    check_same_bits(lengths, room, kv_heads * group, kv_heads, head_dim, causal, precision, bias, seed)


SCRIPT = """
from tests.ops.test_nomad_kept_op import Case, check_same_bits, kept_model, session
for precision in (32, 16):
    for bias, causal in ((True, False), (False, True), (False, False)):
        check_same_bits([1, 130, 0, 17, 64, 65, 3], 9, 6, 2, 20, causal, precision, bias)
        check_same_bits([300, 2], 0, 2, 2, 64, causal, precision, bias)
case = Case(2, kv_heads=2, tokens=70, mask=(3, 1, 70, 70))
case.check(session(kept_model(case)).run(None, case.feeds())[0])
"""


@each_isa
def test_with_each_isa(isa: str) -> None:
    check_with_isa(isa, SCRIPT)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0 and kv_num_heads 0, expected 1 to"),
        ({"kv_num_heads": 3}, "num_heads is 4 and kv_num_heads 3"),
        ({"causal": 2}, "causal is 2, expected 0 or 1"),
        ({"zero_hidden_rows": -1}, "zero_hidden_rows is -1, expected 0 or 1"),
        ({"precision": 8}, "precision is 8, expected 32 or 16"),
        ({"scale": float("inf")}, "scale is inf, expected a finite value"),
    ],
)
def test_bad_attributes(attributes: dict[str, Any], message: str) -> None:
    model = node_model(**{"num_heads": 4, "kept": True} | attributes)  # type: ignore[arg-type]
    model.ClearField("functions")
    with pytest.raises(Exception, match=f"{NODE}: {message}"):
        session(model)


ROWS = {name: (1, 6, 32) for name in ("query", "key", "value")}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"kept": (6,)}, r"kept 'kept' has shape \[6\], expected \[batch, tokens\]"),
        ({"kept": (2, 3, 1)}, r"kept 'kept' has shape \[2, 3, 1\]"),
        (
            {"kept": (2, 4)},
            "query has 1 x 6 tokens and key 6, but kept 'kept' marks 8 tokens as kept, expected 1 x 8",
        ),
        ({"kept": (0, 4)}, "query has 1 x 6 tokens and key 6, but kept 'kept' marks 0 tokens"),
        ({name: (2, 3, 32) for name in ROWS}, "query has 2 x 3 tokens and key 3, but kept 'kept' marks 6 tokens"),
        ({name: (0, 6, 32) for name in ROWS}, "query has 0 x 6 tokens and key 6, but kept 'kept' marks 6 tokens"),
        ({"query": (1, 5, 32)}, "query has 1 x 5 tokens and key 6, but kept 'kept' marks 6 tokens"),
        ({"key": (1, 7, 32), "value": (1, 7, 32)}, "query has 1 x 6 tokens and key 7, but kept 'kept' marks 6 tokens"),
        ({"key": (2, 6, 32)}, r"key 'key' has shape \[2, 6, 32\], expected \[1, T, 32\] \(4 heads of 8\), or"),
        ({"value": (1, 5, 32)}, r"value 'value' has shape \[1, 5, 32\], expected 1 sequences of 6 tokens"),
        (
            {"query": (1, 6, 30)},
            r"query 'query' has shape \[1, 6, 30\], expected \[B, S, a multiple of 4 heads\] or \[B, 4, S, D\]\. Feed",
        ),
        ({"query": (6, 32)}, r"query 'query' has shape \[6, 32\]"),
        ({"query": (1, 3, 6, 8)}, r"query 'query' has shape \[1, 3, 6, 8\], expected"),
        ({"query": (1, 4, 5, 8)}, "query has 1 x 5 tokens and key 6, but kept 'kept' marks 6 tokens"),
        (
            {"key": (1, 4, 6, 9)},
            r"key 'key' has shape \[1, 4, 6, 9\], expected \[1, T, 32\] \(4 heads of 8\), or \[1, 4, T, 8\]\. Feed",
        ),
        ({"value": (1, 4, 5, 8)}, r"value 'value' has shape \[1, 4, 5, 8\], expected 1 sequences of 6 tokens"),
        (
            {"mask": (1, 1, 6, 6)},
            r"mask 'mask' has shape \[1, 1, 6, 6\], expected a shape that broadcasts to \[2, 4, 3, 3\]",
        ),
        ({"mask": (3, 1, 1, 3)}, "mask 'mask' has shape"),
        ({"mask": (1, 2, 1, 1, 3)}, "mask 'mask' has shape"),
        ({"mask": (0, 1, 1, 3)}, "mask 'mask' has shape"),
    ],
)
def test_bad_shapes(shapes: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"mask": (2, 1, 1, 3), "kept": (2, 3)} | ROWS | shapes
    model = node_model(4, kept=True)
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    model.ClearField("functions")
    feeds = {name: np.ones(shape, np.int64 if name == "kept" else np.float32) for name, shape in sizes.items()}
    with pytest.raises(Exception, match=f"{NODE}: .*{message}"):
        session(model).run(None, feeds)


def test_bad_joined_rows() -> None:
    model = node_model(4, 2, True, kept=True)
    feeds = {"query": np.zeros((1, 3, 63), np.float32), "mask": np.zeros((1, 1, 1, 1), np.float32)}
    with pytest.raises(
        Exception, match=rf"{NODE}: query 'query' has shape \[1, 3, 63\], expected \[B, S, a multiple of 8"
    ):
        session(model).run(None, feeds | {"kept": np.ones((1, 3), np.int64)})


def test_too_many_tokens() -> None:
    """The number of tokens per padded sequence is limited, even if few of them are kept."""
    case = Case(0, kept=np.zeros((1, 2**24 + 1)), heads=1, kv_heads=1, head_dim=1)
    with pytest.raises(Exception, match=f"{NODE}: kept has 16777217 tokens a sequence, expected at most 16777216"):
        session(kept_model(case)).run(None, case.feeds())


@pytest.mark.parametrize("name", ["key", "value"])
def test_key_without_value(name: str) -> None:
    case = Case(0)
    model = kept_model(case, True)
    (other,) = {"key", "value"} - {name}
    model.graph.node[0].input[PACKED_INPUTS.index(name)] = "query"
    assert model.graph.node[0].input[PACKED_INPUTS.index(other)] == other
    model.ClearField("functions")
    with pytest.raises(Exception, match="only one of the inputs key and value is given"):
        session(model)


def test_kept_is_needed() -> None:
    model = node_model(4, kept=True)
    model.ClearField("functions")
    model.graph.node[0].input.pop()
    model.graph.input.pop()
    with pytest.raises(Exception, match=r"attention|PackedNoMADAttention"):
        session(model)


def test_shape_is_inferred() -> None:
    for joined, width in ((False, 32), (True, 64)):
        model = node_model(4, 2, joined, kept=True, shapes={"query": ["one", "rows", width]})
        model.graph.output[0].type.tensor_type.ClearField("shape")
        model.ClearField("functions")
        assert session(model).get_outputs()[0].shape == ["one", "rows", 32]
