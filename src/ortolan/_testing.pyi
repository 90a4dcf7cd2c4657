"""Kernels for tests and benchmarks, by name: only in builds with -DORTOLAN_TESTING=ON, never in wheels."""

from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

def feature_sets() -> list[str]:
    """The names of all rows of ops/isa/feature_sets.inc, a set behind those that it contains."""

def check_embedded(files: list[int]) -> None:
    """Raises where files of so many bytes are too much for a compiled model that holds them."""

def simd_lanes() -> dict[str, int]:
    """The targets of the build that this CPU can run, and how many floats a register of each holds."""

def simd(target: str, function: str, *arrays: NDArray[Any], number: int = 0) -> NDArray[np.uint8] | None:
    """A function of ops/simd on the bytes of the arrays: 4096 bytes, 0xEE where it writes nothing.

    None: the target has no such function (src/testing/simd_kernels.cc lists all that it can call).
    """

def peak(target: str, product: str, rounds: int) -> int:
    """Products of a target, "MultiplyAdd", "DotInt8" or "DotNibbles", with all operands in registers.

    Returns how many multiply-adds these were. Raises ValueError for other names and targets that this CPU cannot run.
    """

class KernelInfo(TypedDict):
    name: str
    isa: str
    runs_here: bool
    least_rows: NotRequired[int]  # matrix products: from how many rows of x on the kernel is taken

def sparse_amx_matmul_kernels() -> list[KernelInfo]:
    """The rows of the room's kernel table, best first."""

def sparse_amx_matmul(
    x: NDArray[Any],
    masks: NDArray[np.uint8],
    values: NDArray[np.uint16],
    offsets: NDArray[np.int64],
    k: int,
    n: int,
    bias: NDArray[Any] | None = None,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """y [m, n] = bf16(x) [m, k] @ W + bias on one thread, by the named kernel or the best one.

    Raises ValueError for malformed tensors, wrong shapes and kernels that this CPU cannot run.
    """

def linear_layer(
    x: NDArray[Any],
    masks: NDArray[np.uint8],
    values: NDArray[np.uint16],
    offsets: NDArray[np.int64],
    k: int,
    n: int,
    *,
    bias: NDArray[Any] | None = None,
    residual: NDArray[Any] | None = None,
    activation: int = 0,
    gated_columns: int = 0,
    norm: tuple[NDArray[Any], NDArray[Any], float] | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> NDArray[np.float32]:
    """What the plan of a linear layer makes of x [m, k]: ops/matmul/linear_plan.h. norm: weight, bias, epsilon.

    Raises ValueError for malformed tensors, wrong shapes and a set of features that this CPU has not.
    """

class DeviceChoice:
    """Which side computes calls of m rows: ops/matmul/device_choice.h."""

    def __init__(self) -> None: ...
    def takes(self, m: int) -> bool: ...
    def took(self, m: int, on_device: bool, seconds: float) -> None: ...

def sparse_amx_matmul_int8_kernels() -> list[KernelInfo]:
    """The rows of the kernel table for int8 weights, best first."""

def sparse_amx_matmul_int8(
    x: NDArray[Any],
    masks: NDArray[np.uint8],
    values: NDArray[np.int8],
    offsets: NDArray[np.int64],
    scales: NDArray[np.float32],
    k: int,
    n: int,
    bias: NDArray[Any] | None = None,
    kernel: str | None = None,
    x_zero_points: bool = False,
    zero_points: NDArray[np.int8] | None = None,
) -> NDArray[np.float32]:
    """y [m, n] = x [m, k] quantized row by row @ (W * scales) + bias on one thread, by the named or best kernel.

    scales are [panels, 1, 16], as pack_scales makes them. x_zero_points: each row of x is quantized with a zero point.
    zero_points, in the same order: what is taken off W, only with x_zero_points.
    Raises ValueError for malformed tensors, wrong shapes and kernels that this CPU cannot run.
    """

def sparse_amx_matmul_int4(
    x: NDArray[Any],
    masks: NDArray[np.uint8],
    values: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    scales: NDArray[np.uint16],
    group_size: int,
    k: int,
    n: int,
    bias: NDArray[Any] | None = None,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """The same with int4 weights and bf16 scales [panels, ceil(k / group_size), 16]; group_size is 32, 64 or 128."""

def epilogue_kernels() -> list[KernelInfo]:
    """The rows of the epilogue's kernel table, best first."""

def epilogue(
    y: NDArray[Any],
    activation: int,
    residual: NDArray[Any] | None = None,
    factor: NDArray[Any] | None = None,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """activation(y) factor + residual [m, n] as a new array, by the named kernel or the best one.

    activation: 0 none, 1 ReLU, 2 GELU by erf, 3 GELU by tanh, 4 SiLU. The result keeps the gaps between the rows of y;
    they hold zeros. Raises ValueError for other activations, wrong shapes, a residual whose rows are not contiguous,
    and kernels that this CPU cannot run.
    """

def layer_norm_kernels() -> list[KernelInfo]:
    """The rows of LayerNormalization's kernel table, best first."""

def layer_norm(
    x: NDArray[Any],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32],
    epsilon: float,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """LayerNormalization of the rows of x [m, n] as a new array, by the named kernel or the best one.

    weight and bias: [n]. The result keeps the gaps between the rows of x; they hold zeros. Raises ValueError for wrong
    shapes and kernels that this CPU cannot run.
    """

def lut_post_op_kernels() -> list[KernelInfo]:
    """The rows of the room's kernel table, best first."""

def lut_post_op(x: NDArray[Any], table: NDArray[Any], kernel: str | None = None) -> NDArray[Any]:
    """table[the bits of x as an unsigned number], of x's shape and the table's type, on one thread.

    x: uint8, int8, uint16 or int16. table: these or float32, [256] or [65536]. kernel: a name out of
    lut_post_op_kernels; None: the best one.
    Raises ValueError for others.
    """

def nomad_attention_kernels() -> list[KernelInfo]:
    """The rows of the room's kernel table, best first."""

def nomad_attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    scale: float,
    mask: NDArray[Any] | None = None,
    causal: bool = False,
    zero_hidden_rows: bool = False,
    precision: int = 32,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """softmax(scale q k^T + mask) v [heads, queries, head_dim] on one thread, by the named kernel or the best one.

    q [heads, queries, head_dim]; k, v [keys, head_dim], which all heads share; mask [heads, queries, keys], each of
    them or 1. Raises ValueError for wrong shapes and kernels that this CPU cannot run.
    """

def append_keys(
    cache: NDArray[np.uint8], tokens: int, keys: NDArray[Any], codebook: NDArray[Any], kernel: str | None = None
) -> None:
    """Append keys [count, head_dim] to a cache of key codes, in place (ops/formats/key_code_cache.h).

    cache [capacity, head_dim / d_sub / 2] holds `tokens` tokens and has room for `count` more; codebook
    [head_dim / d_sub, 16, d_sub]; kernel: a row of kv_cache_kernels, without it the best one that runs here.
    Raises ValueError for wrong shapes.
    """

def key_codes(cache: NDArray[np.uint8], tokens: int, codebook: NDArray[Any]) -> NDArray[np.uint8]:
    """The codes [tokens, head_dim / d_sub] of a cache."""

def decode_attention_kernels() -> list[KernelInfo]:
    """The rows of the table of kernels for one token, best first."""

DecodePartial = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]

def decode_attention(
    q: NDArray[np.float32],
    scale: float,
    keys: NDArray[Any],
    values: NDArray[Any],
    codebooks: NDArray[np.float32] | None = None,
    tokens: int | None = None,
    begin: int = 0,
    end: int | None = None,
    first_key: int = 0,
    kernel: str | None = None,
) -> DecodePartial:
    """One token's attention over tokens begin … end-1 of the caches, on one thread: max, sum [kv_heads, heads] and y
    [kv_heads, heads, head_dim] (ops/attention/decode.h).

    q [kv_heads, heads, head_dim]; keys: codes [kv_heads, capacity, row_bytes] with their codebooks [kv_heads,
    head_dim / d_sub, 16, d_sub], or float32 [kv_heads, rows, head_dim], of the tokens from first_key on; values: int8
    caches [kv_heads, capacity, 2 + head_dim] (uint8) or float32 [kv_heads, capacity, head_dim]; tokens: in the caches,
    None: as many as fit. Raises ValueError for other shapes, ranges and kernels that this CPU cannot run.
    """

def decode_scores(
    q: NDArray[np.float32],
    scale: float,
    keys: NDArray[Any],
    codebooks: NDArray[np.float32] | None = None,
    tokens: int | None = None,
    begin: int = 0,
    end: int | None = None,
    first_key: int = 0,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """The scores [kv_heads, heads, end - begin] of decode_attention, in powers of two."""

def run_attention_plan(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    scale: float,
    causal: bool = False,
    precision: int = 32,
    threads: int = 1,
    most_bytes: int | None = None,
) -> NDArray[np.float32]:
    """NoMADAttention's plan (ops/nomad_attention/nomad_attention.h) without a cache, without ONNX Runtime.

    q [batch, queries, heads, head_dim], k and v [batch, keys, kv_heads, head_dim]. Raises MemoryError where a piece of
    its memory is more than most_bytes.
    """

def kv_cache_kernels() -> list[KernelInfo]:
    """The rows of the table of kernels of caches (ops/attention/kv_cache/kv_cache.h), best first."""

def decode_keys(
    cache: NDArray[np.uint8],
    tokens: int,
    codebook: NDArray[Any],
    begin: int = 0,
    end: int | None = None,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """The centroids [end - begin, head_dim] of a cache's codes."""

def append_values(cache: NDArray[np.uint8], tokens: int, values: NDArray[Any], kernel: str | None = None) -> None:
    """Append values as _native.append_values, by a row of kv_cache_kernels."""

def decode_values(
    cache: NDArray[np.uint8], tokens: int, begin: int = 0, end: int | None = None, kernel: str | None = None
) -> NDArray[np.float32]:
    """The values [end - begin, head_dim] of a cache."""

def rotate(
    x: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    interleaved: bool = False,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """Rotary embedding of a row x [head_dim]."""

def softmax_kernels() -> list[KernelInfo]:
    """The rows of the table of kernels of softmax (ops/attention/decode.h), best first."""

def visible_range(mask: NDArray[np.float32], kernel: str | None = None) -> tuple[int, int, bool]:
    """From the first to behind the last number of a row of a mask that hides nothing, and whether all of it is 0."""

def merge_decode(a: DecodePartial, b: DecodePartial, kernel: str | None = None) -> DecodePartial:
    """The partial result of the tokens of both."""

def finish_decode(partial: DecodePartial, kernel: str | None = None) -> NDArray[np.float32]:
    """y / sum [kv_heads, heads, head_dim] of a partial result."""

def stream_read(buffer: NDArray[np.uint8], threads: int = 1, prefetch_bytes: int = 4096) -> int:
    """Read the buffer once, an equal part a thread, and return a checksum: the memory's rate."""

def w4a8_matmul_kernels() -> list[KernelInfo]:
    """The rows of the room's kernel table, best first."""

def w4a8_matmul(
    x: NDArray[Any],
    weights: NDArray[np.uint8],
    scales: NDArray[Any],
    group_size: int,
    k: int,
    n: int,
    zero_points: NDArray[np.uint8] | None = None,
    bias: NDArray[Any] | None = None,
    kernel: str | None = None,
    minimums: NDArray[Any] | None = None,
    zero_point_steps: int = 1,
) -> NDArray[np.float32]:
    """y [m, n] = x [m, k] quantized group by group @ W + bias on one thread, by the named kernel or the best one.

    scales and minimums [panels, groups, 16] are float32, or the bits of float16 as uint16. zero_point_steps: 16 where
    zero_points are sixteenths.
    Raises ValueError for malformed tensors, wrong shapes and kernels that this CPU cannot run.
    """

def w8a8_matmul_kernels() -> list[KernelInfo]:
    """The rows of the room's kernel table, best first."""

def w8a8_matmul(
    x: NDArray[Any],
    weights: NDArray[np.int8],
    scales: NDArray[Any],
    group_size: int,
    k: int,
    n: int,
    bias: NDArray[Any] | None = None,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """The same with the weights of pack_int8_group."""

def vnni_spmm_kernels() -> list[KernelInfo]:
    """The rows of the room's kernel table, best first."""

def vnni_spmm(
    x: NDArray[Any],
    values: NDArray[np.int8],
    indices: NDArray[np.uint16],
    starts: NDArray[np.int64],
    scales: NDArray[np.float32],
    k: int,
    n: int,
    bias: NDArray[Any] | None = None,
    kernel: str | None = None,
    x_scale: float | None = None,
    x_zero_point: int = 0,
) -> NDArray[np.float32]:
    """y [m, n] = x [m, k] quantized @ W + bias on one thread, by the named kernel or the best one.

    x is quantized row by row, or with x_scale and x_zero_point.
    Raises ValueError for malformed tensors, wrong shapes and kernels that this CPU cannot run or that k is too large
    for, a scale that is not positive and a zero point outside of 0 to 255.
    """

def vnni_spmm_hidden(
    x: NDArray[Any],
    x_scale: float,
    x_zero_point: int,
    values: NDArray[np.int8],
    indices: NDArray[np.uint16],
    starts: NDArray[np.int64],
    scales: NDArray[np.float32],
    k: int,
    n: int,
    bias: NDArray[Any] | None,
    table_x_scale: float,
    table_x_zero_point: int,
    table_y_scale: float,
    table_y_zero_point: int,
    table: NDArray[np.uint8],
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """What a hidden layer passes on, as floats: table_y_scale (q - table_y_zero_point).

    Raises ValueError as vnni_spmm does.
    """

def masked_matmul_kernels() -> list[KernelInfo]:
    """The rows of ops/masked_matmul/kernels.inc, best first."""

def masked_matmul(
    a: NDArray[Any], b: NDArray[Any], way: str = "blocks", kernel: str | None = None
) -> NDArray[np.float32] | None:
    """a [m, k] @ b [k, n] on one thread, zeros skipped; None unless all numbers are finite.

    way: "blocks" of zeros of b; "two_sided": also what tiles of a do not use; "values" of a, one by one.
    """

def masked_matmul_plan(
    a: NDArray[np.float32], b: NDArray[np.float32], finite: bool = False, kernel: str | None = None
) -> tuple[NDArray[np.float32], str]:
    """a [m, k] @ b [k, n] on one thread as the operator's plan makes it, and the way it took.

    finite: it is known that b is. The ways: "dense", "panels", "rows", "compact", "blocks", "two_sided", "values".
    """

def masked_rows(
    a: NDArray[Any],
    b: NDArray[Any],
    scales: NDArray[np.float32] | None = None,
    group: int = 1,
    always: NDArray[np.uint8] | None = None,
    kernel: str | None = None,
    panels: bool = False,
) -> NDArray[np.float32]:
    """a [m, k] @ (b [k, n] * scales) on one thread, reading only the rows of b that a uses, or always names.

    b: float32, int8 or uint16 (bits of bf16). scales: [groups, n], of `group` rows of b each.
    """
