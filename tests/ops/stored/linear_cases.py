"""Cases for the linear layers SparseAMXMatMul, W4A8MatMul, W8A8MatMul and VNNISpMM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from ortolan import _native

from ..block_sparse import Range, quantize_tokens
from ..groups import quantize_groups
from ..quantized import quantize_rows
from . import numbers
from .bounds import Product, U, float_product, integer_product
from .case import ROWS, Arrays, Case, bfloat16, one_node

NONE, RELU, GELU, GELU_TANH, SILU = range(5)  # the attribute `activation`

# Columns: k, n, percentage of zeros.
SHAPES = ((1, 1, 0), (33, 17, 50), (64, 16, 100), (130, 70, 30), (385, 5, 80), (577, 161, 50))
FEW_ROWS = (1, 5, 17, 70)


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer: the operator's inputs for it, and the product with it.

    integer: True if the sums are integers and therefore exact.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    constants: Arrays
    attributes: dict[str, Any]
    k: int
    n: int
    integer: bool
    product: Callable[[np.ndarray], Product] | None


@dataclass(frozen=True)
class End:
    """An epilogue.

    residual: "", or its first dimension: "1", or "m" for the rows of x. norm: epsilon of LayerNormalization, or 0 for
    none.
    """

    name: str = ""
    bias: bool = False
    activation: int = NONE
    gated_columns: int = 0
    residual: str = ""
    norm: float = 0.0

    @property
    def exact(self) -> bool:
        return self.activation in (NONE, RELU) and not self.norm

    def error(self, product: Product, arrays: Arrays) -> np.ndarray:
        p = product.plus(arrays["bias"]) if self.bias else product
        gate = p.columns(0, self.gated_columns) if self.gated_columns else p
        if self.activation != NONE:
            gate = gate.activated(1.0, 0.0) if self.activation == RELU else gate.activated()
        if self.gated_columns:
            half = product.value.shape[1] // 2
            gate = gate.times(p.columns(half, half + self.gated_columns))
        if self.residual:
            # After an activation, `value` bounds the magnitude, so the magnitude of the residual is added.
            plain = self.activation == NONE and not self.gated_columns
            gate = gate.plus(arrays["residual"] if plain else np.abs(arrays["residual"]))
        return gate.layer_norm_error(arrays["norm_weight"], self.norm) if self.norm else gate.error


ENDS = (
    End("relu, row", bias=True, activation=RELU, residual="1"),
    End("residual", residual="m"),
    End("gated", bias=True, gated_columns=40, residual="m"),
    End("gelu", bias=True, activation=GELU),
    End("gelu by tanh, residual", activation=GELU_TANH, residual="m"),
    End("gated silu", bias=True, activation=SILU, gated_columns=40, residual="m"),
)


def linear_case(weight: Weight, end: End, rows: tuple[int, ...] = ROWS, width: int = 0) -> Case:
    """Return a case. width: columns of x; 0: the weight's k."""
    name = f"{weight.op_type} {weight.name} {weight.k}x{weight.n}" + (f", {end.name}" if end.name else "")
    rng = numbers.generator(name)
    columns = end.gated_columns or weight.n
    feeds = {"x": numbers.rows_of_x(rng, rows[-1], width or weight.k)}
    constants = dict(weight.constants)
    if end.bias:
        constants["bias"] = numbers.uniform(rng, (weight.n,))
    if end.residual == "1":
        constants["residual"] = numbers.uniform(rng, (1, columns))
    elif end.residual:
        feeds["residual"] = numbers.uniform(rng, (rows[-1], columns))
    if end.norm:
        constants["norm_weight"] = numbers.uniform(rng, (columns,))
        constants["norm_bias"] = numbers.uniform(rng, (columns,))
    arrays = constants | feeds
    inputs = [name if name in arrays else "" for name in weight.inputs]
    while not inputs[-1]:
        inputs.pop()
    attributes = {"format_version": 1, "k": weight.k, "n": weight.n} | weight.attributes
    attributes |= {"activation": end.activation, "gated_columns": end.gated_columns}
    if end.norm:
        attributes["norm_epsilon"] = end.norm
    product = weight.product
    return Case(
        name,
        one_node(weight.op_type, inputs, constants, feeds, **attributes),
        [feeds],
        frozenset({"y"} if weight.integer and end.exact else ()),
        None if product is None else lambda: end.error(product(feeds["x"]), arrays),
        rows,
        ("x", "residual") if end.residual == "m" else ("x",),
    )


BITMAP_INPUTS = ("x", "masks", "values", "offsets", "bias", "residual", "scales")
GROUPS = {"bf16": 0, "int8": 0, "int4 g32": 32, "int4 g64": 64, "int4 g128": 128}


def bitmap_weight(kind: str, dense: bool, k: int, n: int, zeros: int) -> Weight:
    rng = numbers.generator(f"bitmap {kind} {k} {n}")
    group = GROUPS[kind]
    constants: Arrays = {}
    product: Callable[[np.ndarray], Product]
    if kind == "bf16":
        w = numbers.uniform(rng, (k, n))
        w[rng.integers(0, 100, (k, n)) < zeros] = 0
        packed: tuple[np.ndarray, ...] = _native.pack_bitmap(w, dense=dense)
        values = bfloat16(packed[1])
        product = _bf16_product(w)
    else:
        bits = 4 if group else 8
        q = numbers.sparse_integers(rng, k, n, zeros, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        scales = numbers.scales(rng, (-(-k // group) if group else 1, n), 8 if group else 24)
        packed = (_native.pack_bitmap_int4 if group else _native.pack_bitmap_int8)(q, dense=dense)
        values = packed[1]
        if group:
            constants["scales"] = bfloat16(_native.pack_scales(scales, bf16=True))
        else:
            constants["scales"] = _native.pack_scales(scales, bf16=False)
        product = _rows_product(q, scales, group or None)
    constants |= {"masks": packed[0], "values": values, "offsets": packed[2]}
    attributes = {"weight_bits": {"bf16": 16, "int8": 8}.get(kind, 4), "group_size": group}
    name = f"{kind} {'dense' if dense else 'bitmap'}"
    return Weight(name, "SparseAMXMatMul", BITMAP_INPUTS, constants, attributes, k, n, kind != "bf16", product)


def _bf16_product(w: np.ndarray) -> Callable[[np.ndarray], Product]:
    def rounded(a: np.ndarray) -> np.ndarray:
        return a.astype(ml_dtypes.bfloat16).astype(np.float32)

    return lambda x: float_product(rounded(x), rounded(w))


def _rows_product(q: np.ndarray, scales: np.ndarray, group: int | None) -> Callable[[np.ndarray], Product]:
    return lambda x: integer_product(*quantize_rows(x), q, scales, group)


GROUP_INPUTS = (
    *("x", "weights", "scales", "bias", "residual", "zero_points"),
    *("norm_weight", "norm_bias", "minimums", "subgroup_scales", "high_bits"),
)


def group_weight(group: int, half: bool, zero_points: bool, k: int, n: int) -> Weight:
    """Return a weight of W4A8MatMul without minimums. half: scales are float16."""
    name = f"g{group} {'f16' if half else 'f32'}{' zero points' if zero_points else ''}"
    rng = numbers.generator(f"{name} {k} {n}")
    q = rng.integers(0, 16, (k, n)).astype(np.uint8)
    q[0], q[:, -1] = 0, 15
    shape = (-(-k // group), n)
    scales = numbers.scales(rng, shape, 11 if half else 24)
    zeros = rng.integers(0, 16, shape).astype(np.uint8) if zero_points else np.full(shape, 8, np.uint8)
    constants = {"weights": _native.pack_int4_group(q)}
    if half:
        halves = _native.pack_group_rows(scales.astype(np.float16).view(np.uint16))
        constants["scales"] = halves.view(np.float16)
    else:
        constants["scales"] = _native.pack_group_rows(scales)
    if zero_points:
        constants["zero_points"] = _native.pack_group_rows(zeros)
    centered = q.astype(np.int64) - np.repeat(zeros, group, axis=0)[:k]
    used = scales.astype(np.float16).astype(np.float32) if half else scales
    return Weight(
        name,
        "W4A8MatMul",
        GROUP_INPUTS,
        constants,
        {"group_size": group},
        k,
        n,
        True,
        lambda x: integer_product(*quantize_groups(x, group), centered, used, group),
    )


def minimum_weight(group: int, half: bool, k: int, n: int) -> Weight:
    """Return a weight of W4A8MatMul with minimums."""
    name = f"g{group} {'f16' if half else 'f32'} minimums"
    rng = numbers.generator(f"{name} {k} {n}")
    q = rng.integers(0, 16, (k, n)).astype(np.uint8)
    q[0], q[:, -1] = 0, 15
    shape = (-(-k // group), n)
    dtype = np.float16 if half else np.float32
    scales = numbers.scales(rng, shape, 11 if half else 24).astype(dtype)
    minimums = (-7 * numbers.scales(rng, shape, 11 if half else 24)).astype(dtype)
    constants: Arrays = {"weights": _native.pack_int4_group(q)}
    for name_of, rows in (("scales", scales), ("minimums", minimums)):
        packed = _native.pack_group_rows(rows.view(np.uint16) if half else rows)
        constants[name_of] = packed.view(dtype)
    # Placeholders for omitted inputs, which must exist because later inputs are used.
    constants |= {"residual": np.zeros(1, np.float32), "zero_points": np.zeros(1, np.uint8)}
    constants |= {"norm_weight": np.ones(n, np.float32), "norm_bias": np.zeros(n, np.float32)}

    def product(x: np.ndarray) -> Product:
        """Return the product with q - 8, plus the sums of x in each group times the group's value for q = 8."""
        rounded, s = quantize_groups(x, group)
        padded = np.zeros((len(x), shape[0] * group), np.int64)
        padded[:, :k] = rounded
        sums = padded.reshape(len(x), shape[0], group).sum(axis=2)
        above = minimums.astype(np.float64) + 8 * scales.astype(np.float64)
        ones = np.ones((shape[0], n), np.int64)
        a = integer_product(rounded, s, q.astype(np.int64) - 8, scales, group)
        b = integer_product(sums, s, ones, above, 1)
        # Adding the two parts in one sum has twice as many terms, so each error counts twice.
        return Product(a.value + b.value, 2 * (a.error + b.error) + U * np.abs(a.value + b.value))

    attributes = {"group_size": group}
    return Weight(name, "W4A8MatMul", GROUP_INPUTS, constants, attributes, k, n, True, product)


INT8_GROUP_INPUTS = ("x", "weights", "scales", "bias", "residual", "norm_weight", "norm_bias")


def subgroup_weight(bits: int, group: int, subgroup: int, k: int, n: int) -> Weight:
    """Return a weight of W4A8MatMul in subgroups with integer scales."""
    name = f"g{group} s{subgroup} {bits} bits"
    rng = numbers.generator(f"{name} {k} {n}")
    rows = (-(-k // subgroup), n)
    zeros = rng.integers(0, 2**bits, rows).astype(np.uint8)
    largest = 127 // np.maximum(zeros, 2**bits - 1 - zeros)
    steps = np.minimum(rng.integers(0, 2 ** (8 - bits), rows), largest).astype(np.uint8)
    q = rng.integers(0, 2**bits, (k, n)).astype(np.uint8)
    q[0], q[:, -1] = 0, 2**bits - 1
    scales = numbers.scales(rng, (-(-k // group), n), 11).astype(np.float16)
    stored = np.zeros((-(-k // 64) * 64 // subgroup, n), np.uint8)
    stored[: len(zeros)] = steps | zeros << (8 - bits)
    constants: Arrays = {
        "weights": _native.pack_int4_group(q & 15),
        "scales": _native.pack_group_rows(scales.view(np.uint16)).view(np.float16),
        "subgroup_scales": _native.pack_group_rows(stored),
    }
    if bits > 4:
        constants["high_bits"] = _native.pack_high_bits(q, bits)
    step, zero = (np.repeat(array.astype(np.int64), subgroup, axis=0)[:k] for array in (steps, zeros))
    values, used = step * (q - zero), scales.astype(np.float32)
    return Weight(
        name,
        "W4A8MatMul",
        GROUP_INPUTS,
        constants,
        {"format_version": 2, "group_size": group, "subgroup_size": subgroup, "bits": bits},
        k,
        n,
        True,
        lambda x: integer_product(*quantize_groups(x, group), values, used, group),
    )


def int8_group_weight(group: int, half: bool, k: int, n: int) -> Weight:
    """Return a weight of W8A8MatMul. half: scales are float16."""
    name = f"g{group} {'f16' if half else 'f32'}"
    rng = numbers.generator(f"{name} {k} {n} int8")
    q = rng.integers(-128, 128, (k, n)).astype(np.int8)
    q[0], q[:, -1] = -128, 127
    dtype = np.float16 if half else np.float32
    scales = numbers.scales(rng, (-(-k // group), n), 11 if half else 24).astype(dtype)
    packed = _native.pack_group_rows(scales.view(np.uint16) if half else scales).view(dtype)
    return Weight(
        name,
        "W8A8MatMul",
        INT8_GROUP_INPUTS,
        {"weights": _native.pack_int8_group(q), "scales": packed},
        {"group_size": group},
        k,
        n,
        True,
        lambda x: integer_product(*quantize_groups(x, group), q.astype(np.int64), scales, group),
    )


BLOCK_INPUTS = (
    *("x", "values", "indices", "starts", "scales", "bias", "residual", "norm_weight", "norm_bias", "x_scale"),
    *("x_zero_point", "hidden_values", "hidden_indices", "hidden_starts", "hidden_scales", "hidden_bias", "table"),
    *("table_x_scale", "table_x_zero_point", "table_y_scale", "table_y_zero_point"),
)


def block_weight(k: int, n: int, zeros: int, given: Range | None = None) -> Weight:
    """Return a weight of VNNISpMM. given: fixed quantization range of x; None: one range per row."""
    rng = numbers.generator(f"blocks {k} {n} {zeros}")
    q = numbers.sparse_integers(rng, k, n, zeros, -128, 127, outputs=4)
    scales = numbers.scales(rng, (n,))
    packed = _native.pack_block_sparse(q)
    constants: Arrays = dict(zip(("values", "indices", "starts"), packed, strict=True)) | {"scales": scales}
    if given is not None:
        constants |= _range_constants("x", given)

    def product(x: np.ndarray) -> Product:
        if given is None:
            return integer_product(*quantize_tokens(x), q, scales[None], None)
        known = np.nan_to_num(x, nan=2.0**HUGEST, posinf=2.0**HUGEST, neginf=-(2.0**HUGEST))
        rounded = given.quantize(known).astype(np.int64) - given.zero_point
        return integer_product(rounded, np.full((len(x), 1), given.scale), q, scales[None], None)

    name = f"{zeros} % zeros" + (", given range" if given is not None else "")
    return Weight(name, "VNNISpMM", BLOCK_INPUTS, constants, {"norm_epsilon": -1.0}, k, n, True, product)


HUGEST = 100


def _range_constants(name: str, given: Range) -> Arrays:
    return {
        f"{name}_scale": np.array(given.scale, np.float32),
        f"{name}_zero_point": np.array(given.zero_point, np.uint8),
    }


def with_hidden_layer(weight: Weight, hidden_k: int, zeros: int) -> Weight:
    """Add a hidden layer with random table and ranges; without error bound, as values near ties may be a step off."""
    hidden = block_weight(hidden_k, weight.k, zeros)
    rng = numbers.generator(f"hidden {hidden_k} {weight.k}")
    constants = {f"hidden_{name}": array for name, array in hidden.constants.items()}
    constants |= {
        "hidden_bias": numbers.uniform(rng, (weight.k,)),
        "table": rng.integers(0, 256, 256).astype(np.uint8),
        # A placeholder for an omitted input, which must exist because later inputs are used.
        "residual": np.zeros(1, np.float32),
        "norm_weight": np.ones(weight.n, np.float32),
        "norm_bias": np.zeros(weight.n, np.float32),
    }
    constants |= _range_constants("x", Range(2.0**-6 * 1.1, 117)) | _range_constants("table_y", Range(0.0131, 121))
    # Small enough that some sums are clipped.
    constants |= _range_constants("table_x", Range(2.0**-4 * float(hidden_k) ** 0.5, 131))
    return replace(
        weight,
        name=f"{weight.name} behind {hidden_k} {zeros} %",
        constants=constants | weight.constants,
        attributes=weight.attributes | {"hidden_k": hidden_k},
        product=None,
    )


BIAS = End(bias=True)


def zero_point_weight(k: int, n: int, of_weights: bool) -> Weight:
    """Return a dense int8 weight of SparseAMXMatMul for rows of x with zero points.

    of_weights: the weight has zero points too.
    """
    name = f"int8 dense, zero points{' of both' if of_weights else ''}"
    rng = numbers.generator(f"{name} {k} {n}")
    q = numbers.sparse_integers(rng, k, n, 0, -128, 127)
    scales = numbers.scales(rng, (1, n), 24)
    masks, values, offsets = _native.pack_bitmap_int8(q, dense=True)
    constants = {"masks": masks, "values": values, "offsets": offsets}
    constants["scales"] = _native.pack_scales(scales, bf16=False)
    zeros = np.zeros(n, np.int8)
    inputs = BITMAP_INPUTS
    if of_weights:
        zeros = rng.integers(-128, 128, n).astype(np.int8)
        constants["zero_points"] = _native.pack_scales(zeros[None], bf16=False).astype(np.int8)
        inputs += ("norm_weight", "norm_bias", "zero_points")
    return Weight(
        name,
        "SparseAMXMatMul",
        inputs,
        constants,
        {"weight_bits": 8, "group_size": 0, "x_zero_points": 1},
        k,
        n,
        True,
        lambda x: integer_product(*quantize_rows(x, True), q.astype(np.int64) - zeros, scales, None),
    )


def zero_point_cases() -> Iterator[Case]:
    for of_weights in (False, True):
        for k, n in ((1, 1), (33, 17), (130, 70), (577, 161)):
            yield linear_case(zero_point_weight(k, n, of_weights), BIAS)
        yield linear_case(zero_point_weight(100, 96, of_weights), ENDS[1], FEW_ROWS)
    yield linear_case(zero_point_weight(2100, 330, True), BIAS, FEW_ROWS)


def bitmap_cases() -> Iterator[Case]:
    for kind in GROUPS:
        for dense in (False, True):
            for i, (k, n, zeros) in enumerate(SHAPES):
                yield linear_case(bitmap_weight(kind, dense, k, n, zeros), BIAS if i % 2 else End())
            for end in ENDS if kind in ("bf16", "int8", "int4 g32") else ():
                yield linear_case(bitmap_weight(kind, dense, 100, 96, 50), end, FEW_ROWS)
    # Sizes with many tiles per row, and panels that are divided among threads.
    for kind in ("bf16", "int8", "int4 g32"):
        yield linear_case(bitmap_weight(kind, False, 2100, 330, 50), BIAS, FEW_ROWS)


def group_cases() -> Iterator[Case]:
    for group in (32, 64, 128):
        for half in (False, True):
            for zero_points in (False, True):
                for k, n, end in ((33, 17, End()), (130, 70, BIAS), (577, 161, End())):
                    yield linear_case(group_weight(group, half, zero_points, k, n), end)
    for k, n in ((1, 1), (64, 16), (385, 5)):
        yield linear_case(group_weight(32, False, True, k, n), BIAS)
    for end in ENDS:
        yield linear_case(group_weight(32, True, True, 100, 96), end, FEW_ROWS)
    yield linear_case(group_weight(32, True, False, 2100, 330), BIAS, FEW_ROWS)


def subgroup_cases() -> Iterator[Case]:
    for bits in (4, 5, 6):
        for group, subgroup in ((64, 16), (128, 32), (256, 16)):
            for k, n, end in ((33, 17, End()), (577, 161, BIAS)):
                yield linear_case(subgroup_weight(bits, group, subgroup, k, n), end)
    yield linear_case(subgroup_weight(4, 256, 16, 1, 1), BIAS)
    for end in ENDS:
        yield linear_case(subgroup_weight(4, 256, 16, 300, 96), end, FEW_ROWS)
    yield linear_case(subgroup_weight(4, 256, 16, 2100, 330), BIAS, FEW_ROWS)


def int8_group_cases() -> Iterator[Case]:
    for group in (32, 64, 128):
        for half in (False, True):
            for k, n, end in ((33, 17, End()), (130, 70, BIAS), (577, 161, End())):
                yield linear_case(int8_group_weight(group, half, k, n), end)
    yield linear_case(int8_group_weight(32, False, 1, 1), BIAS)
    for end in (*ENDS, End("norm", bias=True, residual="m", norm=1e-5)):
        yield linear_case(int8_group_weight(32, True, 100, 96), end, FEW_ROWS)
    yield linear_case(int8_group_weight(32, True, 2100, 330), BIAS, FEW_ROWS)


def minimum_cases() -> Iterator[Case]:
    for group in (32, 64, 128):
        for half in (False, True):
            for k, n, end in ((33, 17, End()), (130, 70, BIAS), (577, 161, End())):
                yield linear_case(minimum_weight(group, half, k, n), end)
    yield linear_case(minimum_weight(32, False, 1, 1), BIAS)
    for end in (*ENDS, End("norm", bias=True, residual="m", norm=1e-5)):
        yield linear_case(minimum_weight(32, True, 100, 96), end, FEW_ROWS)
    yield linear_case(minimum_weight(32, True, 2100, 330), BIAS, FEW_ROWS)


def block_cases() -> Iterator[Case]:
    for zeros in (0, 80, 90):
        for i, (k, n, _) in enumerate(SHAPES):
            yield linear_case(block_weight(k, n, zeros), BIAS if i % 2 else End())
    yield linear_case(block_weight(33, 17, 100), BIAS)
    yield linear_case(block_weight(2100, 330, 80), BIAS, FEW_ROWS)
    yield linear_case(block_weight(40000, 6, 80), End(), (1, 2, 5, 17))
    given = Range(2.0**-6 * 1.3, 119)
    for k, n, zeros in ((33, 17, 0), (130, 70, 80), (577, 161, 90)):
        yield linear_case(block_weight(k, n, zeros, given), BIAS)
    for end in ENDS:
        yield linear_case(block_weight(100, 96, 80), end, FEW_ROWS)
    yield linear_case(block_weight(100, 96, 80, given), End("norm", bias=True, residual="m", norm=1e-5), FEW_ROWS)
    yield linear_case(block_weight(130, 70, 80), End("norm", bias=True, residual="1", norm=1e-12))
    for hidden_k, k, n, zeros in ((1, 1, 1, 0), (33, 130, 17, 0), (200, 70, 42, 80), (577, 161, 96, 90)):
        yield linear_case(with_hidden_layer(block_weight(k, n, zeros), hidden_k, zeros), BIAS, width=hidden_k)


def cases() -> Iterator[Case]:
    yield from bitmap_cases()
    yield from zero_point_cases()
    yield from group_cases()
    yield from minimum_cases()
    yield from subgroup_cases()
    yield from int8_group_cases()
    yield from block_cases()
