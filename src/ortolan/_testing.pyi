"""Calls of single kernels for tests and benchmarks. Only in builds with -DORTOLAN_TESTING=ON, never in wheels.

`kernel` is a name from the list of a table (`..._kernels`), or None for the best kernel on this CPU. All functions run
on one thread unless they take `threads`, and raise ValueError for malformed tensors, wrong shapes and kernels that this
CPU cannot run.
"""

from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

AMX_VECTORS: str  # the feature set that AMX kernels of this build use besides AMX

def feature_sets() -> list[str]:
    """Return the names of the feature sets in ops/isa/feature_sets.inc. A set comes after all sets that it contains."""

def tensor_view(
    shape: list[int], steps: list[tuple[str, list[int]]]
) -> tuple[list[int], list[list[tuple[int, int]]]] | None:
    """Follow a tensor's axes through steps such as ("Reshape", target) and ("Transpose", axes) (ops/match/views.h).

    Returns:
        The shape, and the parts (original axis, stride) of each axis; None if the effect of a step is unknown.
    """

def check_embedded(files: list[int]) -> None:
    """Raise an error if embedded files of these sizes, in bytes, are too large for a compiled model."""

def simd_lanes() -> dict[str, int]:
    """Return the lanes (floats in a register) of each target in this build that the CPU can run."""

def simd(target: str, function: str, *arrays: NDArray[Any], number: int = 0) -> NDArray[np.uint8] | None:
    """Call a function of ops/simd on the bytes of the arrays.

    Returns:
        4096 bytes, 0xEE where the function writes nothing; None if the target has no such function
        (src/testing/simd_kernels.cc lists the functions).
    """

def peak(target: str, product: str, rounds: int) -> int:
    """Run a kind of multiply-adds ("MultiplyAdd", "DotInt8" or "DotNibbles") with all operands in registers.

    Returns:
        The number of multiply-adds.

    Raises:
        ValueError: another product, or a target that this CPU cannot run.
    """

class KernelInfo(TypedDict):
    """A row of a kernel table."""

    name: str
    isa: str
    runs_here: bool
    least_rows: NotRequired[int]  # only for matrix product kernels: minimum number of rows of x

def sparse_amx_matmul_kernels() -> list[KernelInfo]:
    """List the kernels for bf16 weights, best first."""

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
    """Return y [m, n] = bf16(x) [m, k] @ W + bias."""

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
    """Run the plan of a linear layer on x, float [m, k] (ops/matmul/linear_plan.h).

    masks, values and offsets are the bf16 weight. bias is [n]; residual broadcasts with y; activation is as in
    `epilogue`. gated_columns: columns of y of a gated layer; 0 for other layers. norm: weight, bias and epsilon of a
    LayerNormalization. isa: a feature set that this CPU has; None for the active one.
    """

class DeviceChoice:
    """Chooses between the CPU and an OpenCL device for calls with m rows (ops/matmul/device_choice.h)."""

    def __init__(self) -> None:
        """Create a choice without measurements."""
    def takes(self, m: int) -> bool:
        """Return whether the device should run the next call with m rows."""
    def took(self, m: int, on_device: bool, seconds: float) -> None:
        """Record the duration of a call."""

def sparse_amx_matmul_int8_kernels() -> list[KernelInfo]:
    """List the kernels for int8 weights, best first."""

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
    """Return y [m, n] = x [m, k], quantized row by row, @ ((W - zero_points) * scales) + bias.

    scales are [panels, 1, 16], as made by `pack_scales`. x_zero_points quantizes each row of x with a zero point, and
    is required for zero_points of the weights, [panels, 1, 16].
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
    """Return the product with int4 weights and bf16 scales [panels, ceil(k / group_size), 16].

    group_size is 32, 64 or 128.
    """

def epilogue_kernels() -> list[KernelInfo]:
    """List the kernels of the epilogue, best first."""

def epilogue(
    y: NDArray[Any],
    activation: int,
    residual: NDArray[Any] | None = None,
    factor: NDArray[Any] | None = None,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """Return activation(y) factor + residual [m, n] as a new array.

    The result has the row stride of y, with zeros in the gaps. The rows of residual are contiguous.

    activation: 0 none, 1 ReLU, 2 GELU with erf, 3 GELU with tanh, 4 SiLU.
    """

def layer_norm_kernels() -> list[KernelInfo]:
    """List the kernels of LayerNormalization, best first."""

def layer_norm(
    x: NDArray[Any],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32],
    epsilon: float,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """Return the LayerNormalization of the rows of x [m, n] as a new array; weight and bias are [n].

    The result has the row stride of x, with zeros in the gaps.
    """

def lut_post_op_kernels() -> list[KernelInfo]:
    """List the kernels of LutPostOp, best first."""

def lut_post_op(x: NDArray[Any], table: NDArray[Any], kernel: str | None = None) -> NDArray[Any]:
    """Return table[the bits of x as an unsigned integer], with x's shape and the table's type.

    x is uint8, int8, uint16 or int16; table, [256] or [65536], has one of these types or is float32.
    """

def nomad_attention_kernels() -> list[KernelInfo]:
    """List the exact attention kernels, best first."""

def nomad_attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    scale: float,
    mask: NDArray[Any] | None = None,
    causal: bool = False,
    zero_hidden_rows: bool = False,
    precision: int = 32,
    softcap: float = 0.0,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """Return softmax(capped(scale q k^T) + mask) v [heads, queries, head_dim].

    q is [heads, queries, head_dim]; k and v are [keys, head_dim], shared by all heads; mask broadcasts to [heads,
    queries, keys]. causal: the queries are the last tokens of the keys and do not see later keys. zero_hidden_rows:
    rows whose softmax is NaN give zeros. precision: 32 or 16; ignored if a kernel is named.
    """

def append_keys(
    cache: NDArray[np.uint8], tokens: int, keys: NDArray[Any], codebook: NDArray[Any], kernel: str | None = None
) -> None:
    """Append keys like `_native.append_keys`, with a kernel of `kv_cache_kernels`."""

def key_codes(cache: NDArray[np.uint8], tokens: int, codebook: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the codes [tokens, head_dim / d_sub] of a cache."""

def decode_attention_kernels() -> list[KernelInfo]:
    """List the kernels for decoding, best first."""

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
    softcap: float = 0.0,
    kernel: str | None = None,
) -> DecodePartial:
    """Compute attention of one token over tokens begin … end-1 of the caches (ops/attention/decode.h).

    Args:
        q: [kv_heads, heads, head_dim].
        scale: factor of the scores.
        keys: codes [kv_heads, capacity, row_bytes], or float32 [kv_heads, rows, head_dim] from token first_key on.
        values: int8 caches [kv_heads, capacity, 2 + head_dim] (uint8), or float32 [kv_heads, capacity, head_dim].
        codebooks: [kv_heads, head_dim / d_sub, 16, d_sub] if keys are codes.
        tokens: tokens in the caches; None for their capacity.
        begin: first token.
        end: end of the tokens; None for all.
        first_key: token of the first row of float keys.
        softcap: scores become softcap tanh(scores / softcap); 0 leaves them.
        kernel: see the module.

    Returns:
        max and sum [kv_heads, heads], y [kv_heads, heads, head_dim].
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
    softcap: float = 0.0,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """Return the scores [kv_heads, heads, end - begin] of `decode_attention`, in powers of two."""

def run_attention_plan(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    scale: float,
    causal: bool = False,
    precision: int = 32,
    reproducible: bool = False,
    threads: int = 1,
    most_bytes: int | None = None,
) -> NDArray[np.float32]:
    """Run the plan of NoMADAttention without a cache and without ONNX Runtime (ops/nomad_attention/nomad_attention.h).

    q is [batch, queries, heads, head_dim], k and v are [batch, keys, kv_heads, head_dim]. precision is 32 or 16.

    Raises:
        MemoryError: an allocation exceeds most_bytes.
    """

def kv_cache_kernels() -> list[KernelInfo]:
    """List the kernels of caches (ops/attention/kv_cache/kv_cache.h), best first."""

def decode_keys(
    cache: NDArray[np.uint8],
    tokens: int,
    codebook: NDArray[Any],
    begin: int = 0,
    end: int | None = None,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """Return the keys [end - begin, head_dim] decoded from a cache of codes."""

def append_values(cache: NDArray[np.uint8], tokens: int, values: NDArray[Any], kernel: str | None = None) -> None:
    """Append values like `_native.append_values`, with a kernel of `kv_cache_kernels`."""

def decode_values(
    cache: NDArray[np.uint8], tokens: int, begin: int = 0, end: int | None = None, kernel: str | None = None
) -> NDArray[np.float32]:
    """Return the values [end - begin, head_dim] decoded from a cache."""

def rotate(
    x: NDArray[np.float32],
    cos: NDArray[np.float32],
    sin: NDArray[np.float32],
    interleaved: bool = False,
    kernel: str | None = None,
) -> NDArray[np.float32]:
    """Return the rotary embedding of a row x [head_dim]."""

def softmax_kernels() -> list[KernelInfo]:
    """List the softmax kernels (ops/attention/decode.h), best first."""

def visible_range(mask: NDArray[np.float32], kernel: str | None = None) -> tuple[int, int, bool]:
    """Return the range from the first to the last visible element of a mask row, and whether the mask is 0 in it."""

def merge_decode(a: DecodePartial, b: DecodePartial, kernel: str | None = None) -> DecodePartial:
    """Merge two partial results into the partial result for the tokens of both."""

def finish_decode(partial: DecodePartial, kernel: str | None = None) -> NDArray[np.float32]:
    """Return y / sum [kv_heads, heads, head_dim] of a partial result."""

def stream_read(buffer: NDArray[np.uint8], threads: int = 1, prefetch_bytes: int = 4096) -> int:
    """Read the buffer once, an equal part per thread, to measure memory bandwidth. Returns a checksum."""

def w4a8_matmul_kernels() -> list[KernelInfo]:
    """List the kernels for int4 weights in groups, best first."""

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
    subgroup_scales: NDArray[np.uint8] | None = None,
    subgroup_size: int = 0,
    high_bits: NDArray[np.uint8] | None = None,
    bits: int = 4,
    subgroup_scale_bits: int = 0,
    subgroup_zero_point: int = 0,
    subgroup_minimums: NDArray[np.uint8] | None = None,
) -> NDArray[np.float32]:
    """Return y [m, n] = x [m, k], quantized group by group, @ W + bias.

    weights are made by `pack_int4_group`; scales, [panels, groups, 16], are float32 or the bits of float16 (uint16);
    group_size is 32, 64 or 128. The weights may have zero_points or, with the type of scales, minimums, of the same
    shape. zero_point_steps is 16 if zero_points count sixteenths. With a subgroup_size (ops/formats/subgroup.h),
    group_size is 64, 128 or 256, and `subgroup_kernels` lists the kernels; if also subgroup_scale_bits is 8
    (ops/formats/k_quant.h), group_size may be 32, and `k_quant_kernels` lists them.
    """

def subgroup_kernels() -> list[KernelInfo]:
    """List the kernels for weights in subgroups, best first."""

def k_quant_kernels() -> list[KernelInfo]:
    """List the kernels for K-quants (ops/formats/k_quant.h), best first."""

def w8a8_matmul_kernels() -> list[KernelInfo]:
    """List the kernels for int8 weights in groups, best first."""

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
    """Return x @ W + bias with weights made by `pack_int8_group`; all other arguments as in `w4a8_matmul`."""

def vnni_spmm_kernels() -> list[KernelInfo]:
    """List the kernels for block-sparse weights, best first."""

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
    """Return y [m, n] = quantized x [m, k] @ W + bias.

    x is quantized row by row, or with x_scale (above 0) and x_zero_point (0 to 255). Each kernel has a largest k.
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
    """Return the output of a hidden layer, 8-bit q from the table, as floats table_y_scale (q - table_y_zero_point)."""

def masked_matmul_kernels() -> list[KernelInfo]:
    """List the kernels of MaskedMatMul, best first."""

def masked_matmul(
    a: NDArray[Any], b: NDArray[Any], way: str = "blocks", kernel: str | None = None
) -> NDArray[np.float32] | None:
    """Return a [m, k] @ b [k, n], skipping zeros; None unless all values are finite.

    way: "blocks" skips zero blocks of b, "two_sided" also unused inputs of tiles of a, "values" single zeros of a.
    """

def masked_matmul_plan(
    a: NDArray[np.float32], b: NDArray[np.float32], finite: bool = False, kernel: str | None = None
) -> tuple[NDArray[np.float32], str]:
    """Run the operator's plan on a [m, k] @ b [k, n]; `finite` states that b has no NaN or infinity.

    Returns:
        The product and the way used: "dense", "panels", "rows", "compact", "blocks", "two_sided" or "values".
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
    """Return a [m, k] @ (b [k, n] * scales), reading only the rows of b that a uses or `always` marks.

    b is float32, int8 or uint16 (bits of bf16). scales are [groups, n], a row for each `group` rows of b. always,
    uint8 [k], is nonzero for rows that are never skipped. panels: use the panel kernels.
    """
