"""All rows of a comparison: every kind of work of every operator, as calls in ONNX Runtime sessions.

The installed package makes the models; both libraries run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ortolan.benchmarks import masked_matmul, nomad_attention, sparse_amx_matmul, vnni_spmm, w4a8_matmul
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.vnni_spmm_function import INPUTS as VNNI_INPUTS
from ortolan.graph_passes.operators.vnni_spmm_function import neutral_inputs
from ortolan.graph_passes.passes.fuse_lut import OP_TYPE as LUT_OP
from ortolan.graph_passes.passes.prompt import prune_prompt

from .layers import Feeds, Layer, Row, TimedModel, Work, copies_for, layer_of, layers_work, normal, write_layers
from .models import model_works

_GROUP_SIZE = 128


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work. The tiny ones are for smoke tests."""

    square: tuple[int, int] = (4096, 4096)
    wide: tuple[int, int] = (4096, 14336)
    encoder: tuple[int, int] = (768, 3072)
    masked: tuple[int, ...] = (512, 1024)
    decode: tuple[int, int] = (2048, 4096)
    elements: tuple[int, ...] = (16 * 3072, 1 << 20)
    prompt: int = 512
    context: int = 16384
    float_context: int = 4096
    heads: tuple[int, int, int] = (32, 8, 128)
    few: tuple[int, ...] = (1, 4, 16)
    many: tuple[int, ...] = (128,)


TINY = Sizes(
    (96, 64), (96, 64), (96, 64), (64,), (96, 64), (1000,), 20, 64, 32, (4, 2, 32), few=(1,), many=(20,)
)  # fmt: skip


def works_of(sizes: Sizes, tiny_models: bool) -> dict[str, list[Work]]:
    """Return the works of each operator."""
    return {
        "sparse_amx_matmul": _sparse_amx_matmul(sizes),
        "w4a8_matmul": _w4a8_matmul(sizes),
        "vnni_spmm": _vnni_spmm(sizes),
        "lut_post_op": _lut_post_op(sizes),
        "masked_matmul": _masked_matmul(sizes),
        "nomad_attention": _nomad_attention(sizes),
        "epilogue": _epilogue(sizes),
        "call": _call(),
        "models": model_works(tiny_models),
    }


# ---- linear layers ---------------------------------------------------------------------------------------------------


def sparse_layer(kind: str, k: int, n: int, sparsity: float | None) -> Layer:
    """Return a SparseAMXMatMul layer; sparsity None is dense storage."""
    rng = np.random.default_rng(k * n)
    weight: np.ndarray = rng.random((k, n), dtype=np.float32)
    if kind == "bf16":
        weight -= 0.5
    else:
        most = 127 if kind == "int8" else 7
        weight = ((weight * 2 - 1) * most).round().astype(np.int8)
    if sparsity is not None:
        weight[rng.random((k, n), dtype=np.float32) < sparsity] = 0
    groups = -(-k // _GROUP_SIZE) if kind == "int4" else 1
    scales = rng.random((groups, n), dtype=np.float32)
    storage = sparse_amx_matmul.Storage.DENSE if sparsity is None else sparse_amx_matmul.Storage.BITMAP
    return layer_of(sparse_amx_matmul.our_node(kind, weight, scales, _GROUP_SIZE, storage))


def group_layer(k: int, n: int, group_size: int, zero_points: bool) -> Layer:
    """Return a W4A8MatMul layer."""
    rng = np.random.default_rng(k * n)
    q = rng.integers(0, 16, (k, n), dtype=np.uint8)
    groups = (-(-k // group_size), n)
    scales = (rng.random(groups, dtype=np.float32) / 64).astype(np.float16)
    zeros = rng.integers(0, 16, groups, dtype=np.uint8) if zero_points else None
    return layer_of(w4a8_matmul.our_node(q, scales, group_size, zero_points=zeros))


def block_layer(k: int, n: int, sparsity: float) -> Layer:
    """Return a VNNISpMM layer."""
    rng = np.random.default_rng(k * n)
    return layer_of(vnni_spmm.our_node(vnni_spmm.random_weight(rng, k, n, sparsity), rng.random(n, dtype=np.float32)))


def _sparse_amx_matmul(sizes: Sizes) -> list[Work]:
    k, n = sizes.square
    works = []
    for kind in ("bf16", "int8", "int4"):
        for sparsity in (None, 0.5, 0.8):
            storage = "dense" if sparsity is None else f"{sparsity:.0%}"
            make = partial(sparse_layer, kind, k, n, sparsity)
            works += layers_work("sparse_amx_matmul", f"{kind} {storage} {k}x{n}", make, k, (*sizes.few, *sizes.many))
    return works


def _w4a8_matmul(sizes: Sizes) -> list[Work]:
    works = []
    for group_size, zero_points in ((32, False), (128, False), (128, True)):
        kind = f"g{group_size}{' zero points' if zero_points else ''}"
        batch = [m for m in (1, 8) if m <= max(sizes.few)]
        for (k, n), rows in ((sizes.wide, batch), (sizes.square, sizes.many)):
            make = partial(group_layer, k, n, group_size, zero_points)
            works += layers_work("w4a8_matmul", f"{kind} {k}x{n}", make, k, rows)
    return works


def _vnni_spmm(sizes: Sizes) -> list[Work]:
    works = []
    batch = [m for m in (*sizes.few, *sizes.many) if m != 4]
    for k, n in (sizes.encoder, sizes.encoder[::-1]):
        for sparsity in (0.0, 0.8, 0.9):
            make = partial(block_layer, k, n, sparsity)
            works += layers_work("vnni_spmm", f"{sparsity:.0%} {k}x{n}", make, k, batch)
    k, n = sizes.encoder
    make = partial(hidden_layer, k, n, 0.8)
    return works + layers_work("vnni_spmm", f"hidden 80% {k}x{n}x{k}", make, k, batch)


def hidden_layer(k: int, hidden: int, sparsity: float) -> Layer:
    """Return a fused pair of layers: k inputs, `hidden` outputs, a byte table, and k outputs."""
    rng = np.random.default_rng(k)
    second, first = block_layer(hidden, k, sparsity), block_layer(k, hidden, sparsity)
    names = ("values", "indices", "starts", "scales")
    constants = neutral_inputs(hidden, k)
    constants |= dict(zip(names, second.constants.values(), strict=True))
    constants |= {f"hidden_{name}": array for name, array in zip(names, first.constants.values(), strict=True)}
    constants |= {
        "hidden_bias": rng.standard_normal(hidden, dtype=np.float32),
        "table": rng.integers(0, 256, 256, dtype=np.uint8),
    }
    scales = {"x_scale": 0.03, "table_x_scale": float(np.sqrt(k)), "table_y_scale": 0.03}
    constants |= {name: np.array(scale, np.float32) for name, scale in scales.items()}
    points = {name.replace("scale", "zero_point"): np.array(128, np.uint8) for name in scales}
    # Without an epsilon, no norm is computed.
    constants = {name: array for name, array in (constants | points).items()}
    attributes = {"k": hidden, "n": k, "format_version": 1, "hidden_k": k}
    return Layer(vnni_spmm.OP, ("x", *VNNI_INPUTS[1:]), constants, attributes)


# ---- what follows a layer --------------------------------------------------------------------------------------------


def _epilogue(sizes: Sizes) -> list[Work]:
    k, n = sizes.encoder
    m = sizes.many[0]
    works: list[Work] = []
    for name, make in _epilogues(k, n).items():
        for rows in (sizes.few[-1], m):
            works.append(_epilogue_work(f"{name} m={rows}", make, k, rows))
    return works


def _epilogues(k: int, n: int) -> Mapping[str, Callable[[], Layer]]:
    def with_activation(make: Callable[[], Layer], bias: int, activation: Activation, **more: int) -> Layer:
        # bias: position of `bias` in the operator's inputs.
        layer = make()
        inputs = [*layer.inputs, *[""] * (bias + 2 - len(layer.inputs))]
        inputs[bias] = "bias"
        while not inputs[-1]:
            inputs.pop()
        constants = {**layer.constants, "bias": normal(n, (n,))}
        attributes = {**layer.attributes, "activation": int(activation), **more}
        return replace(layer, inputs=tuple(inputs), constants=constants, attributes=attributes)

    def normalized() -> Layer:
        # A second layer back to k columns, with a residual and its LayerNormalization.
        layer = block_layer(n, k, 0.8)
        norm = {"bias": normal(0, (k,)), "norm_weight": 1 + normal(1, (k,)) / 8, "norm_bias": normal(2, (k,))}
        names = dict(zip(("values", "indices", "starts", "scales"), layer.inputs[1:], strict=True))
        inputs = [names.get(name, name) for name in ("x", *VNNI_INPUTS[1 : VNNI_INPUTS.index("x_scale")])]
        attributes = {**layer.attributes, "norm_epsilon": 1e-12}
        return replace(layer, inputs=tuple(inputs), constants={**layer.constants, **norm}, attributes=attributes)

    dense_bf16 = partial(sparse_layer, "bf16", k, n, None)
    return {
        f"bias, GELU of bf16 {k}x{n}": partial(with_activation, dense_bf16, 4, Activation.GELU),
        f"bias, tanh GELU of int4 {k}x{n}": partial(
            with_activation, partial(group_layer, k, n, 128, False), 3, Activation.GELU_TANH
        ),
        f"bias, GELU of 4x1 80% {k}x{n}": partial(with_activation, partial(block_layer, k, n, 0.8), 5, Activation.GELU),
        f"bias, gated SiLU of int4 {k}x{n}": partial(
            with_activation, partial(group_layer, k, n, 32, False), 3, Activation.SILU, gated_columns=n // 2
        ),
        f"residual, LayerNorm of 4x1 80% {n}x{k}": normalized,
    }


def _epilogue_work(name: str, make: Callable[[], Layer], k: int, rows: int) -> Work:
    def write(folder: Path) -> TimedModel:
        layer = make()
        width = layer.attributes["k"]
        fed = {"x": (None, width)} | ({"residual": (None, k)} if "residual" in layer.inputs else {})
        return write_layers(layer, copies_for(layer.cold_bytes, rows), folder, fed)

    def feeds() -> Feeds:
        layer = make()
        x = {"x": normal(rows, (rows, layer.attributes["k"]))}
        return x | ({"residual": normal(rows + 1, (rows, k))} if "residual" in layer.inputs else {})

    return Work("epilogue", (Row(name, feeds),), write)


# ---- calls with very little work--------------------------------------------------------------------------------------

_CALL = (64, 64)


def _call() -> list[Work]:
    """Return products of one row and 64 x 64 weights, to show a call's overhead: one node alone, and many nodes."""
    k, n = _CALL
    makers: dict[str, Callable[[], Layer]] = {
        "SparseAMXMatMul bf16": partial(sparse_layer, "bf16", k, n, None),
        "W4A8MatMul g32": partial(group_layer, k, n, 32, False),
        "VNNISpMM": partial(block_layer, k, n, 0.8),
    }
    return [
        work
        for name, make in makers.items()
        for copies in (1, 64)
        for work in layers_work("call", f"{name} {k}x{n}, {copies} a run", make, k, (1,), copies)
    ]


# ---- tables, products at run time ------------------------------------------------------------------------------------


# Lookups per run, to amortize waking the other threads, which takes as long as one lookup.
_TABLES = 8


def _lut_post_op(sizes: Sizes) -> list[Work]:
    kinds: Sequence[tuple[type, type]] = ((np.uint8, np.uint8), (np.uint8, np.float32), (np.uint16, np.uint16))
    return [_table_work(x_type, y_type, sizes.elements) for x_type, y_type in kinds]


def _table_work(x_type: type, y_type: type, elements: Sequence[int]) -> Work:
    most = int(np.iinfo(x_type).max)

    def values(seed: int, dtype: type, count: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        if dtype is np.float32:
            return rng.standard_normal(count, dtype=np.float32)
        return rng.integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)

    def write(folder: Path) -> TimedModel:
        layer = Layer(LUT_OP, ("x", "table"), {"table": values(0, y_type, most + 1)}, {"format_version": 1}, y_type)
        return write_layers(layer, _TABLES, folder, {"x": (None,)}, {"x": x_type})

    kind = f"{np.dtype(x_type)} to {np.dtype(y_type)}"
    rows = [Row(f"{kind}, {count} elements", lambda c=count: {"x": values(c, x_type, c)}) for count in elements]  # type: ignore[misc]
    return Work("lut_post_op", tuple(rows), write)


def _masked_matmul(sizes: Sizes) -> list[Work]:
    op = masked_matmul.OP

    def write_product(folder: Path) -> TimedModel:
        layer = Layer(op, ("a", "b"), {}, {"format_version": 1})
        return write_layers(layer, 1, folder, {"a": (None, None), "b": (None, None)})

    def square(n: int, share: float, by_blocks: bool) -> Feeds:
        rng = np.random.default_rng(n)
        make_b = masked_matmul.sparse_blocks if by_blocks else masked_matmul.sparse_elements
        return {"a": masked_matmul.sparse_elements(rng, n, n, share), "b": make_b(rng, n, n, share)}

    rows = [
        Row(f"{kind} {share:.0%} {n}x{n}x{n}", partial(square, n, share, kind == "blocks"))
        for n in sizes.masked
        for kind, share in (("blocks", 0.0), ("blocks", 0.6), ("blocks", 0.8), ("numbers", 0.8))
    ]
    k, n = sizes.decode
    works = [Work("masked_matmul", tuple(rows), write_product)]
    for kind in ("float", "bf16", "int8"):
        works += _constant_works(kind, k, n, sizes)
    return works


def _constant_works(kind: str, k: int, n: int, sizes: Sizes) -> list[Work]:
    def make() -> Layer:
        rng = np.random.default_rng(k + n)
        constants = {"b": masked_matmul.sparse_elements(rng, k, n, 0.0)}
        if kind == "bf16":
            constants["b"] = constants["b"].astype(ml_dtypes.bfloat16)
        elif kind == "int8":
            constants = {"b": rng.integers(-127, 128, (k, n), dtype=np.int8), "s": rng.random((1, n), dtype=np.float32)}
        return Layer(masked_matmul.OP, ("x", *constants), constants, {"format_version": 1})

    def write(folder: Path, rows: int) -> TimedModel:
        layer = make()
        return write_layers(layer, copies_for(layer.cold_bytes, rows), folder, {"x": (None, k)})

    def x(m: int, share: float) -> Feeds:
        return {"x": masked_matmul.sparse_elements(np.random.default_rng(m), m, k, share)}

    def row(m: int, share: float) -> Row:
        return Row(f"{kind} weights {k}x{n}, {share:.0%} of x, m={m}", partial(x, m, share))

    few = [row(1, share) for share in (0.0, 0.5, 0.9)] + [row(max(sizes.few), 0.8)]
    return [
        Work("masked_matmul", tuple(few), partial(write, rows=1)),
        Work("masked_matmul", (row(sizes.many[0], 0.8),), partial(write, rows=sizes.many[0])),
    ]


# ---- attention -------------------------------------------------------------------------------------------------------


def _nomad_attention(sizes: Sizes) -> list[Work]:
    tokens = sizes.prompt
    heads, kv_heads, width = sizes.heads
    works = [
        _exact_work(f"encoder {tokens} tokens, 12 heads of {width // 2}", 12, 12, width // 2, tokens, causal=0),
        _exact_work(f"causal {tokens} tokens, {heads}/{kv_heads} heads of {width}", heads, kv_heads, width, tokens, 1),
        *(
            _exact_work(f"{name} {tokens} tokens, 12 heads of {size}", 12, 12, size, tokens, 0, bf16)
            for size in (width // 2, width // 4)
            for name, bf16 in (("bf16", {}), ("bf16 reproducible", {"reproducible": "everywhere"}))
        ),
    ]
    for name, context, d_sub in (
        ("codes d_sub 1", sizes.context, 1),
        ("codes d_sub 2", sizes.context, 2),
        ("float cache", sizes.float_context, None),
    ):
        for new_tokens in (1, 4):
            works.append(_cached_work(f"{name}, {context} tokens, {new_tokens} new", sizes, context, d_sub, new_tokens))
    works.append(_behind_prompt_work(sizes))
    return works


def _exact_work(
    name: str,
    heads: int,
    kv_heads: int,
    width: int,
    tokens: int,
    causal: int,
    bf16: Mapping[str, str] | None = None,
) -> Work:
    """Return attention without a cache. bf16: more attributes of a node of precision 16; None: precision 32."""
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "causal": causal}
    attributes |= {"precision": 32} if bf16 is None else {"precision": 16, **bf16}
    shapes = {"query": (1, tokens, heads * width)}
    shapes |= dict.fromkeys(("key", "value"), (1, tokens, kv_heads * width))

    def write(folder: Path) -> TimedModel:
        layer = Layer(
            nomad_attention.OP,
            ("query", "nothing", "key", "value"),
            {"nothing": np.zeros(1, np.float32)},
            attributes,
        )
        return write_layers(layer, 1, folder, shapes)

    row = Row(name, lambda: {one: normal(seed, shape) for seed, (one, shape) in enumerate(shapes.items())})
    return Work("nomad_attention", (row,), write)


def _new_tokens(sizes: Sizes, count: int, total: int) -> dict[str, np.ndarray]:
    """Return query, key and value of the last `count` of `total` tokens."""
    heads, kv_heads, width = sizes.heads
    widths = {"query": heads * width, "key": kv_heads * width, "value": kv_heads * width}
    feeds = {name: normal(seed, (1, count, size)) for seed, (name, size) in enumerate(widths.items())}
    return feeds | {"lengths": np.array([total - count], np.int32)}


_CACHED_INPUTS = ("query", "nothing", "key", "value", "past_key", "past_value", "codebooks", "lengths")
_PASTS = ("past_key", "past_value")


def _cached_work(name: str, sizes: Sizes, context: int, d_sub: int | None, new_tokens: int) -> Work:
    """Return new tokens after cached tokens, in caches with free space. d_sub: values per code; None: a float cache."""
    heads, kv_heads, width = sizes.heads
    total = context - nomad_attention.ROOM_LEFT
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "causal": 1, "scale": width**-0.5}

    def caches() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(context)
        if d_sub is not None:
            codebooks, *past = nomad_attention.compressed_caches(
                rng, context, d_sub, tokens=total - new_tokens, kv_heads=kv_heads, head_dim=width
            )
            return codebooks, past[0][None], past[1][None]
        shape = (1, kv_heads, context, width)
        return np.zeros(0, np.float32), normal(0, shape), normal(1, shape)

    def feeds() -> Feeds:
        return _new_tokens(sizes, new_tokens, total) | dict(zip(_PASTS, caches()[1:], strict=True))

    def write(folder: Path) -> TimedModel:
        codebooks, *pasts = caches()
        given = {**_new_tokens(sizes, new_tokens, total), **dict(zip(_PASTS, pasts, strict=True))}
        layer = Layer(
            nomad_attention.OP,
            _CACHED_INPUTS,
            {"nothing": np.zeros(1, np.float32), "codebooks": codebooks},
            attributes,
            of_each_copy=_PASTS,
            present={past.replace("past", "present"): past for past in _PASTS},
        )
        copies = copies_for(sum(past.nbytes for past in pasts), new_tokens)
        shapes = {one: array.shape for one, array in given.items()}
        return write_layers(layer, copies, folder, shapes, {one: array.dtype.type for one, array in given.items()})

    return Work("nomad_attention", (Row(name, feeds),), write)


def _behind_prompt_work(sizes: Sizes) -> Work:
    """Return one token after a prompt in the model, with 30 % of the keys and half of the values pruned."""
    heads, kv_heads, width = sizes.heads
    tokens = sizes.float_context
    given = _new_tokens(sizes, 1, tokens + 1)
    given |= dict.fromkeys(_PASTS, np.zeros((1, kv_heads, 1, width), np.float32))

    def write(folder: Path) -> TimedModel:
        shape = (kv_heads, tokens, width)
        prompt = prune_prompt(normal(0, shape), normal(1, shape), 0.3, 0.5)
        packed = {
            name: tensor.array.view(ml_dtypes.bfloat16) if tensor.array.dtype == np.uint16 else tensor.array
            for name, tensor in prompt.pack().items()
        }
        inputs = ("query", "nothing", "key", "value", *_PASTS, "no_codebooks", "lengths")
        layer = Layer(
            nomad_attention.OP,
            (*inputs, "nothing", "nothing", "nothing", *packed),
            {"nothing": np.zeros(1, np.float32), "no_codebooks": np.zeros(0, np.float32), **packed},
            {
                "num_heads": heads,
                "kv_num_heads": kv_heads,
                "causal": 1,
                "scale": width**-0.5,
                "prompt_tokens": tokens,
                "prompt_head_dim": width,
            },
            of_each_copy=_PASTS,
            present={past.replace("past", "present"): past for past in _PASTS},
        )
        shapes = {one: array.shape for one, array in given.items()}
        types = {one: array.dtype.type for one, array in given.items()}
        return write_layers(layer, copies_for(layer.cold_bytes, 1), folder, shapes, types)

    return Work("nomad_attention", (Row(f"after a prompt of {tokens} tokens in the model", lambda: given),), write)
