"""Test NoMADAttention in ORT: against NumPy and its ONNX function, and on invalid input."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ortolan import _testing
from ortolan.graph_passes.operators.nomad_attention_function import Uses
from ortolan.graph_passes.operators.nomad_cache_function import CacheUses, nomad_cache_function

from ..sampling import examples
from .attention import LOWEST, Floats, assert_attention_close
from .attention_node import node_model
from .single_node import assert_same_bits, session


def by_heads(x: Floats, heads: int) -> Floats:
    """Convert [B, S, heads D] to [B, heads, S, D]."""
    batch, rows, width = x.shape
    return x.reshape(batch, rows, heads, width // heads).transpose(0, 2, 1, 3)


class Case:
    """Random inputs, and a check of the output for them."""

    def __init__(self, seed: int, batch=2, queries=5, keys=7, heads=4, kv_heads=4, head_dim=8, mask=None) -> None:
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads = heads, kv_heads
        widths = {"query": (queries, heads), "key": (keys, kv_heads), "value": (keys, kv_heads)}
        self.feeds: dict[str, Floats] = {
            name: rng.standard_normal((batch, rows, count * head_dim), dtype=np.float32)
            for name, (rows, count) in widths.items()
        }
        self.mask = None
        if mask is not None:
            self.mask = np.array(rng.standard_normal(mask), np.float32)
            if self.mask.ndim:
                self.mask[rng.random(self.mask.shape) < 0.3] = LOWEST
                self.mask[..., 0] = 0
            self.feeds["mask"] = self.mask

    def packed(self) -> dict[str, Floats]:
        feeds = {name: array for name, array in self.feeds.items() if name == "mask"}
        return feeds | {"query": np.concatenate([self.feeds[name] for name in ("query", "key", "value")], -1)}

    def check(
        self,
        y: Floats,
        scale: float | None = None,
        causal: bool = False,
        precision: int = 32,
        softcap: float = 0,
        window: int = 0,
        sinks: Floats | None = None,
    ) -> None:
        q = by_heads(self.feeds["query"], self.heads)
        k, v = (
            by_heads(self.feeds[name], self.kv_heads).repeat(self.heads // self.kv_heads, 1)
            for name in ("key", "value")
        )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        assert y.shape == self.feeds["query"].shape
        y = by_heads(y, self.heads)
        assert_attention_close(y, q, k, v, scale, self.mask, causal, precision, softcap, window, sinks)


def runs(model: onnx.ModelProto, feeds: dict[str, Floats], threads: int = 1) -> list[Floats]:
    """Return the output of the kernel and that of the ONNX function."""
    onnx.checker.check_model(model)
    return [session(model, library=library, threads=threads).run(None, feeds)[0] for library in (True, False)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", [None, (2, 1, 1, 7), (7, 7), (2, 4, 7, 7), (1, 4, 7, 1), (1,)])
def test_kernel_and_function_body_agree(kv_heads: int, packed: bool, causal: int, mask: tuple[int, ...] | None) -> None:
    case = Case(kv_heads, queries=7, kv_heads=kv_heads, mask=mask)
    model = node_model(4, kv_heads, packed, mask is not None, causal=causal, mask_rank=len(mask or ()))
    for y in runs(model, case.packed() if packed else case.feeds):
        case.check(y, causal=bool(causal))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("names", [("query", "key", "value"), ("query",), ("key", "value")])
def test_inputs_by_heads(kv_heads: int, mixed: bool, names: tuple[str, ...]) -> None:
    """Inputs of shape [B, heads, S, D].

    mixed: the function serves both layouts.
    """
    case = Case(kv_heads, queries=5, keys=7, kv_heads=kv_heads, mask=(2, 1, 5, 7))
    feeds = dict(case.feeds)
    for name in names:
        feeds[name] = np.ascontiguousarray(by_heads(feeds[name], 4 if name == "query" else kv_heads))
    every = frozenset(("query", "key", "value"))
    uses = Uses(grouped=True, by_heads=every, by_rows=every) if mixed else None
    model = node_model(4, kv_heads, uses=uses, by_heads=names)
    for y in runs(model, feeds):
        case.check(y)
    if mixed:
        for y in runs(node_model(4, kv_heads, uses=uses), case.feeds):
            case.check(y)


MASKS = {
    "none": None,
    "front": (1, 1, 1, 41),
    "of each sequence": (2, 1, 1, 41),
    "of each query": (2, 1, 3, 41),
    "of each head": (2, 4, 3, 41),
}


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["hides the end", "hides the beginning", "leaves gaps", "adds"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("layout", [(), ("key", "value")])
def test_few_queries_of_more_keys(shape: str, kind: str, kv_heads: int, layout: tuple[str, ...]) -> None:
    """Cross-attention with few queries, as in an encoder-decoder model."""
    case = Case(7, queries=3, keys=41, kv_heads=kv_heads, head_dim=32)
    sizes, rng = MASKS[shape], np.random.default_rng(3)
    if sizes is not None:
        mask = np.zeros(sizes, np.float32)
        for place in np.ndindex(*sizes[:3]):
            cut = 1 + int(rng.integers(0, 20))
            hidden = {
                "hides the end": slice(-cut, None),
                "hides the beginning": slice(cut),
                "leaves gaps": slice(5, 5 + cut),
            }
            if kind == "adds":
                mask[place] = rng.standard_normal(41)
            else:
                mask[(*place, hidden[kind])] = LOWEST
        case.mask = case.feeds["mask"] = mask
    feeds = dict(case.feeds)
    for name in layout:
        feeds[name] = np.ascontiguousarray(by_heads(feeds[name], kv_heads))
    for y in runs(node_model(4, kv_heads, mask=sizes is not None, by_heads=layout), feeds):
        case.check(y)


@pytest.mark.parametrize("queries", [1, 4])
def test_few_queries_are_answered_alike_in_any_batch(queries: int) -> None:
    """A sequence has the same bits alone and in a batch: without padding, with padding, and with a gap in its mask."""
    case = Case(5, 3, queries, 300, head_dim=32, mask=(3, 1, queries, 300))
    model = session(node_model(4))
    case.mask[...] = 0
    case.mask[1, ..., :50] = LOWEST
    plain = model.run(None, case.feeds)[0]
    case.mask[2, ..., 100:120] = LOWEST
    y = model.run(None, case.feeds)[0]
    case.check(y)
    np.testing.assert_array_equal(y[:2], plain[:2])
    for b in range(3):
        alone = model.run(None, {name: array[b : b + 1] for name, array in case.feeds.items()})[0]
        np.testing.assert_array_equal(alone[0], y[b])


@pytest.mark.parametrize("threads", [1, 3])
def test_few_queries_of_very_many_keys_are_answered_alike_in_any_batch(threads: int) -> None:
    """A long sequence has the same bits alone and in a batch, where it is divided among threads in another way."""
    case = Case(6, 16, 1, 9000, head_dim=16, mask=(16, 1, 1, 9000))
    case.mask[...] = 0
    case.mask[1, ..., 5000:] = -np.inf
    y = session(node_model(4), threads=threads).run(None, case.feeds)[0]
    for b in (0, 1):
        feeds = {name: array[b : b + 1] for name, array in case.feeds.items()}
        if b == 1:
            feeds |= {name: feeds[name][:, :5000] for name in ("key", "value")} | {"mask": feeds["mask"][..., :5000]}
        np.testing.assert_array_equal(session(node_model(4)).run(None, feeds)[0][0], y[b])


@pytest.mark.parametrize("hidden", [-1e4, -65504.0])
def test_large_scores_are_seen_through_a_mask(hidden: float) -> None:
    """The mask is added to the scores, so a large score outweighs a mask value."""
    case = Case(8, 2, 1, 300, head_dim=64, mask=(2, 1, 1, 300))
    case.mask[...] = 0
    case.mask[..., 1:] = hidden
    case.feeds["query"][...] = -16 * hidden  # twice the mask value after the scale of 1/8
    case.feeds["key"][...] = 0
    case.feeds["key"][:, 5, ::64] = 1
    for y in runs(node_model(4), case.feeds):
        np.testing.assert_array_equal(y[:, 0], case.feeds["value"][:, 5])


def beside_caches(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the node in a model with one function that also serves nodes with caches."""
    every = frozenset(("query", "key", "value"))
    uses = CacheUses(mixed=every, uncached=True, grouped=True, causal=True, zero_hidden_rows=True, lengths=False)
    node = model.graph.node[0]
    names = {"past_key": "none", "past_value": "none", "codebooks": "no_books", "lengths": "no_lengths"}
    node.input.extend(names.values())
    node.output.extend(["no_key", "no_value"])
    node.attribute.append(helper.make_attribute("rotary_interleaved", 0))
    constants = {"none": np.zeros(1, np.float32), "no_books": np.zeros(0, np.float32)}
    constants["no_lengths"] = np.zeros(0, np.int32)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    model.functions[0].CopyFrom(ir.to_proto(nomad_cache_function(model.opset_import[0].version, uses)))
    return model


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("names", [(), ("query", "key", "value"), ("key", "value")])
@pytest.mark.parametrize(("keys", "causal"), [(5, 0), (9, 0), (3, 0), (5, 1), (9, 1)])
def test_beside_nodes_with_a_cache(kv_heads: int, names: tuple[str, ...], keys: int, causal: int) -> None:
    case = Case(kv_heads, queries=5, keys=keys, kv_heads=kv_heads, mask=(2, 1, 5, keys))
    feeds = dict(case.feeds)
    for name in names:
        feeds[name] = np.ascontiguousarray(by_heads(feeds[name], 4 if name == "query" else kv_heads))
    for y in runs(beside_caches(node_model(4, kv_heads, by_heads=names, causal=causal)), feeds):
        case.check(y, causal=bool(causal))


def test_caches_of_nodes_without_one() -> None:
    model = beside_caches(node_model(4))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "none"))
    with pytest.raises(Exception, match=r"past cache 'none' has shape \[1\], expected"):
        session(model).run(None, Case(0, queries=5, keys=5, mask=(2, 1, 1, 5)).feeds)


@examples(40)
@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 40),
    more_keys=st.integers(0, 70),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    axes=st.none() | st.lists(st.booleans(), max_size=4),
    causal=st.booleans(),
    scale=st.sampled_from([0.0, 0.3, -0.2]),
    softcap=st.sampled_from([None, 0.0, 1.5, 30.0]),
    window=st.sampled_from([None, 0, 1, 8, 50]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    batch, queries, more_keys, kv_heads, group, head_dim, axes, causal, scale, softcap, window, has_sinks, seed
) -> None:
    heads, keys = kv_heads * group, queries + more_keys
    mask = None
    if axes is not None:
        sizes = [batch, heads, queries, keys][4 - len(axes) :]
        mask = [size if whole else 1 for size, whole in zip(sizes, axes, strict=True)]
    case = Case(seed, batch, queries, keys, heads, kv_heads, head_dim, mask)
    sinks = np.linspace(-2, 3, heads, dtype=np.float32) if has_sinks else None
    # A mask could hide all keys of a window.
    window = window if causal and mask is None else None
    given = {"softcap": softcap, "local_window_size": window, "head_sink": sinks}
    model = node_model(
        heads, kv_heads, mask=mask is not None, causal=int(causal), scale=scale, mask_rank=len(mask or ()),
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    for y in runs(model, case.feeds, threads=2):
        case.check(y, scale or None, causal, softcap=softcap or 0, window=window or 0, sinks=sinks)


@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23])
@pytest.mark.parametrize("packed", [False, True])
def test_function_body_serves_every_opset_and_evaluator(opset: int, packed: bool) -> None:
    """The function for this node alone, and the function for all kinds of nodes, run in every opset."""
    case = Case(opset, queries=7, kv_heads=2, mask=(2, 1, 1, 7))
    feeds = case.packed() if packed else case.feeds
    for uses in (None, Uses(packed, True, True, True, True)):
        model = node_model(4, 2, packed, opset=opset, uses=uses)
        for y in (*runs(model, feeds), ReferenceEvaluator(model).run(None, feeds)[0]):
            case.check(y)
    plain = Case(opset, queries=7)
    feeds = plain.packed() if packed else plain.feeds
    for y in runs(
        node_model(4, 4, packed, np.zeros(1, np.float32), opset, Uses(packed, True, True, True, True)), feeds
    ):
        plain.check(y)


@pytest.mark.parametrize(("queries", "keys", "batch"), [(0, 3, 2), (3, 0, 2), (0, 0, 1), (4, 4, 0)])
def test_empty_inputs(queries: int, keys: int, batch: int) -> None:
    """Outputs without keys are zeros."""
    case = Case(0, batch, queries, keys)
    for y in runs(node_model(4, mask_rank=1), case.feeds | {"mask": np.zeros(1, np.float32)}):
        assert y.shape == (batch, queries, 32)
        assert not y.any()


@pytest.mark.parametrize("zero", [0, 1])
def test_rows_that_see_no_key(zero: int) -> None:
    """Fully masked queries give NaN, or zeros if `zero_hidden_rows` is set; other queries are unchanged."""
    case = Case(0, mask=(2, 1, 5, 7))
    model = node_model(4, zero_hidden_rows=zero)
    before = runs(model, case.feeds)
    case.feeds["mask"][1, :, 3] = -np.inf
    for plain, y in zip(before, runs(model, case.feeds), strict=True):
        plain[1, 3] = 0 if zero else np.nan
        np.testing.assert_array_equal(y, plain)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_long_sequences(threads: int) -> None:
    """Enough work for several threads: many rows with few heads, and many heads with few rows."""
    for sizes in ({"batch": 1, "queries": 700, "keys": 700, "heads": 2, "kv_heads": 1, "head_dim": 64}, {"batch": 9}):
        case = Case(threads, **{"queries": 130, "keys": 130, "mask": None} | sizes)  # type: ignore[arg-type]
        model = node_model(case.heads, case.kv_heads, mask=False, causal=1)
        # The mask is a placeholder, because ONNX Runtime up to 1.21 fails on an omitted input before others.
        model.graph.node[0].input[1] = "none"
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "none"))
        case.check(session(model, threads=threads).run(None, case.feeds)[0], causal=True)


def test_precision_16_rounds_and_the_body_does_not() -> None:
    case = Case(1, queries=40, keys=40, head_dim=64, mask=(2, 1, 1, 40))
    kernel, body = runs(node_model(4, precision=16, reproducible="everywhere"), case.feeds)
    case.check(body)
    case.check(kernel, precision=16)
    with pytest.raises(AssertionError, match="over bound"):
        case.check(kernel)


def test_the_fastest_order_keeps_to_the_precision() -> None:
    case = Case(1, queries=200, keys=200, head_dim=64, mask=(2, 1, 1, 200))
    for y in runs(node_model(4, precision=16), case.feeds):
        case.check(y, precision=16)


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_reproducible_nodes_have_the_bits_of_the_scalar_kernel(queries: int) -> None:
    """Calls with few queries too, which other nodes compute in an order that depends on the CPU."""
    case = Case(1, queries=queries, keys=40, head_dim=20)
    (y, _) = runs(node_model(4, mask=False, precision=16, reproducible="everywhere"), case.feeds)
    query, key, value = (by_heads(case.feeds[name], 4) for name in ("query", "key", "value"))
    for b in range(2):
        for head in range(4):
            given = query[b, head : head + 1], key[b, head], value[b, head], 20**-0.5
            expected = _testing.nomad_attention(*given, kernel="scalar/16")[0]
            assert_same_bits(by_heads(y, 4)[b, head], expected)


@pytest.mark.parametrize(("any_order", "now"), [(0, {"reproducible": "everywhere"}), (1, {})])
def test_older_files_keep_their_order(any_order: int, now: dict[str, str]) -> None:
    """Files that were written before `reproducible` existed have any_order."""
    case = Case(1, queries=60, keys=60, head_dim=64)
    older = node_model(4, mask=False, precision=16)
    older.ClearField("functions")
    older.graph.node[0].attribute.append(helper.make_attribute("any_order", any_order))
    found, expected = (
        session(model).run(None, case.feeds)[0] for model in (older, node_model(4, mask=False, precision=16, **now))
    )
    assert_same_bits(found, expected)


def test_shapes_are_inferred(tmp_path) -> None:
    """Shape inference with fixed and symbolic dimensions: the last dimension follows from the heads."""
    for packed, width in ((True, 96), (False, 32)):
        shape: list[int | str] = ["batch", "rows", width]
        names = ("query",) if packed else ("query", "key", "value")
        model = node_model(4, 0, packed, np.zeros(1, np.float32), shapes={name: shape for name in names})
        model.graph.output.pop()
        model.graph.node.append(helper.make_node("Shape", ["y"], ["shape"], start=2))
        model.graph.output.append(helper.make_tensor_value_info("shape", TensorProto.INT64, [1]))
        case = Case(0, queries=7)
        (found,) = session(model).run(None, case.packed() if packed else case.feeds)
        np.testing.assert_array_equal(found, [32])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0 and kv_num_heads 0, expected 1 to"),
        ({"num_heads": -2}, "num_heads is -2"),
        ({"kv_num_heads": 3}, "num_heads is 4 and kv_num_heads 3"),
        ({"causal": 2}, "causal is 2, expected 0 or 1"),
        ({"zero_hidden_rows": -1}, "zero_hidden_rows is -1, expected 0 or 1"),
        ({"reproducible": "here"}, "reproducible is 'here', expected 'everywhere' or no value"),
        ({"reproducible": "everywhere"}, "reproducible is 'everywhere' with precision 32, expected precision 16"),
        ({"precision": 8}, "precision is 8, expected 32 or 16"),
        ({"scale": float("nan")}, "scale is nan, expected a finite value"),
        ({"softcap": -1.0}, "softcap is -1, expected 0, or"),
        ({"softcap": float("inf")}, "softcap is inf, expected 0, or"),
        ({"local_window_size": 4}, "local_window_size is 4, expected 0 unless causal is 1"),
        ({"local_window_size": -1, "causal": 1}, "local_window_size is -1, expected 0 to"),
        ({"head_sink": [1.0, 2.0]}, "head_sink has 2 elements, expected 4, one a head"),
        ({"head_sink": [0.0, 0.0, 0.0, np.nan]}, "head_sink contains nan, expected finite values"),
    ],
)
def test_bad_attributes(attributes: dict[str, Any], message: str) -> None:
    model = node_model(**{"num_heads": 4} | attributes, uses=Uses())  # type: ignore[arg-type]
    with pytest.raises(Exception, match=f"NoMADAttention node 'attention': {message}"):
        session(model)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"query": (2, 5, 30)},
            r"query 'query' has shape \[2, 5, 30\], expected \[B, S, a multiple of 4 heads\] or \[B, 4",
        ),
        ({"query": (5, 32)}, r"query 'query' has shape \[5, 32\]"),
        ({"query": (2, 5, 0)}, r"query 'query' has shape \[2, 5, 0\]"),
        ({"key": (2, 7, 16)}, r"key 'key' has shape \[2, 7, 16\], expected \[2, T, 32\] \(4 heads of 8\)"),
        ({"key": (1, 7, 32)}, r"key 'key' has shape \[1, 7, 32\], expected \[2, T, 32\]"),
        (
            {"value": (2, 6, 32)},
            r"value 'value' has shape \[2, 6, 32\], expected 2 sequences of 7 tokens with 4 heads of 8, like",
        ),
        ({"query": (2, 3, 5, 8)}, r"query 'query' has shape \[2, 3, 5, 8\], expected .* or \[B, 4, S, D\]"),
        ({"key": (2, 4, 7, 9)}, r"key 'key' has shape \[2, 4, 7, 9\], expected .* or \[2, 4, T, 8\]"),
        ({"value": (2, 7, 4, 8)}, r"value 'value' has shape \[2, 7, 4, 8\], expected 2 sequences of 7 tokens"),
        (
            {"mask": (2, 1, 1, 6)},
            r"mask 'mask' has shape \[2, 1, 1, 6\], expected a shape that broadcasts to \[2, 4, 5, 7\]",
        ),
        ({"mask": (1, 2, 1, 1, 7)}, "mask 'mask' has shape"),
        ({"mask": (3, 1, 1, 7)}, "mask 'mask' has shape"),
        ({"query": (2, 8, 32), "causal": 1}, "causal attention has 8 queries and 7 keys, expected at least 8 keys"),
    ],
)
def test_bad_shapes(shapes: dict[str, Any], message: str) -> None:
    sizes = {"query": (2, 5, 32), "mask": (1, 1, 1, 7), "key": (2, 7, 32), "value": (2, 7, 32)} | shapes
    causal = sizes.pop("causal", 0)
    named = {name: [f"{name}{axis}" for axis in range(len(shape))] for name, shape in sizes.items()}
    model = node_model(4, causal=causal, shapes=named)
    feeds = {name: np.zeros(shape, np.float32) for name, shape in sizes.items()}
    with pytest.raises(Exception, match=f"NoMADAttention node 'attention': .*{message}"):
        session(model).run(None, feeds)


def test_key_without_value() -> None:
    model = node_model(4)
    model.graph.node[0].input.pop()
    model.graph.input.pop()
    model.ClearField("functions")
    with pytest.raises(Exception, match="only one of the inputs key and value is given"):
        session(model)
