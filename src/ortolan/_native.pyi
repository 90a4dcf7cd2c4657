"""Native core of Ortolan: packers, unpackers, shared rules, CPU information."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

class CpuInfo(TypedDict):
    """Result of `cpu_info`."""

    name: str
    isa: str
    features: list[str]
    detected_features: list[str]
    isa_problem: str
    microarchitecture: str
    l1_bytes: int
    l2_bytes: int

def cpu_info() -> CpuInfo:
    """Return the CPU and its instruction sets, as described in `ortolan.cpu_info`."""

LEAST_ZERO_BLOCKS: float  # VNNISpMM beats dense int8 from this fraction of zero 4x1 blocks

def find_halves(graph: Graph, value: Any, columns: int) -> tuple[Any, Any, list[Any]] | None:
    """Return the two halves of a value's columns and the nodes that split it (ops/match/halves.h)."""

def find_epilogue(
    graph: Graph, output: Any, factors: list[Any], columns: int, may_take: Callable[[Any], bool]
) -> tuple[int, Any, tuple[Any, int] | None, tuple[Any, Any, float, list[Any]] | None, list[Any]]:
    """Return activation, factor, residual (node, input), norm and nodes of a layer's epilogue (ops/match/epilogue.h).

    Args:
        graph: the graph.
        output: the layer's output [..., columns].
        factors: values that may multiply the output.
        columns: the length of the output's last axis.
        may_take: whether a node may be part of the epilogue.
    """

def find_norms(graph: Graph) -> list[tuple[tuple[Any, Any, float, list[Any]], list[Any], list[Any]]]:
    """Return each float32 norm (weight, bias, epsilon, nodes), the operands it adds, and the Adds, last one first."""

def find_qdq_pairs(graph: Graph) -> list[tuple[Any, str | None, list[Any], list[Any], tuple[float, float] | None]]:
    """Return the quantizations of activations to fixed 8-bit ranges (ops/match/ranges.h).

    Returns:
        For each: the QuantizeLinear, why it cannot be removed or None, nodes that move the codes, DequantizeLinear
        nodes, and bounds to clip to or None.
    """

class Graph:
    """A model graph for pattern rules (ops/match/graph.h)."""

    def __init__(
        self,
        values: list[tuple[Any, ...]],
        graphs: list[tuple[list[tuple[Any, ...]], list[int]]],
        opset: int,
        read: Callable[[Any], tuple[int, list[int], Any] | None],
    ) -> None:
        """Make the graph; src/match_bindings.cc describes the tuples. `read` returns the tensor of a constant."""

class Linear:
    """A linear layer and its weight as stored: ops/match/linear.h."""

    node: Any
    add: Any
    quantize: Any
    nodes: list[Any]
    x: Any
    x_range: tuple[float, int, Any] | None
    bias: Any
    x_scale: Any
    x_zero_point: Any
    y_scale: Any
    y_zero_point: Any
    k: int
    n: int
    transposed: bool
    bias_in_steps: bool
    dtype: int
    form: str
    weight: Any
    codes: Any
    scales: Any
    zero_points: Any
    codes_transposed: bool
    bits: int
    block_size: int
    why_not_kept: str | None
    def scales_of_columns(self, divided: bool = True) -> NDArray[np.float32]: ...
    def zero_points_of_columns(self) -> NDArray[np.int16]: ...

def find_linears(graph: Graph) -> list[Linear | tuple[Any, str, bool]]:
    """Return the linear layers of the graph and its subgraphs, unsorted.

    For similar nodes: (node, reason, whether the operator or the form of its weight is the reason).
    """

class Sum:
    """A sum of symbolic dimensions with factors, and a number."""

    terms: tuple[tuple[Hashable, int], ...]
    number: int

class Dimensions:
    """Symbolic shapes of a graph's values (ops/match/dimensions.h), and the patterns found in the graph."""

    def __init__(self, graph: Graph) -> None: ...
    def shape(self, value: object) -> tuple[Hashable, ...] | None: ...
    def elements(self, value: object) -> tuple[Hashable, ...] | None: ...
    def dtype(self, value: object) -> int:
        """Return the number of a value's element type, 0 if it is unknown."""
    def head_size(self, past: object) -> int | None: ...
    def fused_attention(self, node: object) -> dict[str, Any] | str:
        """Return the fields of ops/match/attention.h's FusedAttention, or why the operator is not supported."""

    def attentions(self, cached: bool) -> list[dict[str, Any] | tuple[Any, str, bool]]:
        """Return fields of attention with or without a cache; for similar subgraphs (node, reason, has a cache)."""

    def attention_texts(self) -> list[str]:
        """Return a line for each result of the rules for attention, as the execution provider uses them."""

def int8_range(codes: NDArray[Any], zero_points: NDArray[np.int16], transposed: bool) -> tuple[int, int]:
    """Return the minimum and maximum of codes - zero_points, a range that includes 0.

    If all zero points are the middle of the codes' type, this is the whole range of the type minus the middle.

    codes are int8 or uint8 [k, n], or [n, k] if transposed; zero_points are int16 [n].
    """

def why_not_int8(k: int, n: int, range: tuple[int, int]) -> str:
    """Return why int8 weights whose codes - zero_points have this range cannot be kept exactly, or an empty string."""

def why_not_scales(scales: NDArray[Any]) -> str:
    """Return why these scales of int8 weights cannot be kept exactly, or an empty string."""

def bitmaps_are_fast(bits: int) -> bool:
    """Return whether products with bitmap weights of 16, 8 or 4 bits are faster on this CPU than with dense weights."""

def gains_from_pairs() -> bool:
    """Return whether kernels on this CPU are faster if int8 weights have a reduced range."""

def is_worth_bitmap(bits: int, k: int, n: int, stored: int) -> bool:
    """Return whether a bitmap is better than dense storage for k x n weights, `stored` of them nonzero.

    Assumes that bitmaps are fast on this CPU (`bitmaps_are_fast`).
    """

def pack_bitmap(
    w: NDArray[Any], dense: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.int64]]:
    """Round w, float [k, n], to bf16 and pack it in the bitmap format (ops/formats/bitmap.h).

    `dense` stores every weight, with empty masks and offsets.

    Returns:
        masks [panels, tiles, 64], values (bf16 bits), offsets [panels + 1].

    Raises:
        ValueError: w is not a matrix of 1 to 2^28 rows and columns.
    """

def pack_two_four(w: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.int64]]:
    """Round w [k, n] to bf16 and pack two of each four inputs of a column (2:4 storage, ops/formats/two_four.h).

    Returns:
        masks [panels, tiles, 64] (positions), values [panels * tiles * 256] (bf16 bits), offsets [0].

    Raises:
        ValueError: as in `pack_bitmap`, or more than two of four weights are nonzero after rounding. The text names the
            first such inputs and their column.
    """

def unpack_bitmap(
    masks: NDArray[np.uint8], values: NDArray[np.uint16], offsets: NDArray[np.int64], k: int, n: int
) -> NDArray[np.float32]:
    """Return the dense [k, n] matrix, from any storage.

    Raises:
        ValueError: the tensors are malformed.
    """

def pack_bitmap_int8(
    q: NDArray[np.int8], dense: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.int8], NDArray[np.int64]]:
    """Pack q [k, n] in the bitmap format of int8 weights (ops/formats/bitmap_int8.h); `dense` as in `pack_bitmap`.

    Returns:
        masks [panels, tiles, 128], values, offsets [panels + 1].

    Raises:
        ValueError: q is not a matrix of 1 to 2^17 rows and 1 to 2^28 columns.
    """

def pack_two_four_int8(q: NDArray[np.int8]) -> tuple[NDArray[np.uint8], NDArray[np.int8], NDArray[np.int64]]:
    """Pack q [k, n] in 2:4 storage.

    Returns:
        masks [panels, tiles, 128] (positions), values [panels * tiles * 512], offsets [0].

    Raises:
        ValueError: as in `pack_bitmap_int8` and `pack_two_four`.
    """

def unpack_bitmap_int8(
    masks: NDArray[np.uint8], values: NDArray[np.int8], offsets: NDArray[np.int64], k: int, n: int
) -> NDArray[np.int8]:
    """Return the dense [k, n] matrix, from any storage.

    Raises:
        ValueError: the tensors are malformed.
    """

def pack_bitmap_int4(
    q: NDArray[np.int8], dense: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """Pack q [k, n], each -8 to 7, in the bitmap format of int4 weights (ops/formats/bitmap_int4.h).

    `dense` as in `pack_bitmap`.

    Returns:
        masks [panels, tiles, 128], values (nibbles), offsets [panels + 1] in bytes.

    Raises:
        ValueError: other values, or q is not a matrix of 1 to 2^17 rows and 1 to 2^28 columns.
    """

def pack_two_four_int4(q: NDArray[np.int8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
    """Pack q [k, n], each -8 to 7, in 2:4 storage.

    Returns:
        masks [panels, tiles, 128] (positions), values [panels * tiles * 256], offsets [0].

    Raises:
        ValueError: as in `pack_bitmap_int4` and `pack_two_four`.
    """

def unpack_bitmap_int4(
    masks: NDArray[np.uint8], values: NDArray[np.uint8], offsets: NDArray[np.int64], k: int, n: int
) -> NDArray[np.int8]:
    """Return the dense [k, n] matrix, from any storage.

    Raises:
        ValueError: the tensors are malformed.
    """

@overload
def pack_scales(scales: NDArray[Any], bf16: Literal[False]) -> NDArray[np.float32]:
    """Pack scales [groups, n] into float32 [panels, groups, 16], zero beyond n.

    Raises:
        ValueError: scales are not a matrix with at least one row and column.
    """

@overload
def pack_scales(scales: NDArray[Any], bf16: Literal[True]) -> NDArray[np.uint16]:
    """Pack scales [groups, n] into bf16 bits [panels, groups, 16], rounded to nearest even."""

def append_keys(cache: NDArray[np.uint8], tokens: int, keys: NDArray[Any], codebook: NDArray[Any]) -> None:
    """Append keys to a cache of key codes, in place (ops/formats/key_code_cache.h).

    Args:
        cache: [capacity, head_dim / d_sub / 2], with room for the keys.
        tokens: number of tokens in the cache.
        keys: float [count, head_dim].
        codebook: float [head_dim / d_sub, 16, d_sub].

    Raises:
        ValueError: wrong shapes.
    """

def decode_keys(cache: NDArray[np.uint8], tokens: int, codebook: NDArray[Any]) -> NDArray[np.float32]:
    """Return the keys [tokens, head_dim] decoded from a cache of codes."""

def append_values(cache: NDArray[np.uint8], tokens: int, values: NDArray[Any]) -> None:
    """Append values to a cache of int8 values, in place (ops/formats/value_cache.h).

    Args:
        cache: [capacity, 2 + head_dim], with room for the values.
        tokens: number of tokens in the cache.
        values: float [count, head_dim].

    Raises:
        ValueError: wrong shapes.
    """

def decode_values(cache: NDArray[np.uint8], tokens: int) -> NDArray[np.float32]:
    """Return the values [tokens, head_dim] decoded from a cache."""

def pack_int4_group(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack q [k, n], each 0 to 15, into weights [panels, pairs of rows, 64] (ops/formats/int4_group.h)."""

def unpack_int4_group(weights: NDArray[np.uint8], k: int, n: int) -> NDArray[np.uint8]:
    """Return the [k, n] matrix of `pack_int4_group`."""

def pack_high_bits(q: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack the bits above the low 4 of q [k, n], 5 or 6 bits each (ops/formats/subgroup.h)."""

def pack_int8_group(q: NDArray[np.int8]) -> NDArray[np.int8]:
    """Pack q [k, n] into weights [panels, rows, 16, 4] (ops/formats/int8_group.h)."""

def unpack_int8_group(weights: NDArray[np.int8], k: int, n: int) -> NDArray[np.int8]:
    """Return the [k, n] matrix of `pack_int8_group`."""

def pack_group_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """Pack float32, uint16 or uint8 rows [groups, n] into [panels, groups, 16], zero beyond n."""

def pack_block_sparse(q: NDArray[np.int8]) -> tuple[NDArray[np.int8], NDArray[np.uint16], NDArray[np.int64]]:
    """Pack q [k, n] in blocks of 4 outputs x 1 input (ops/formats/block_sparse_4x1.h).

    Returns:
        values [quads, 4, 4], indices [quads, 4], starts [ceil(n / 4) + 1].

    Raises:
        ValueError: q is not a matrix of 1 to 2^16 rows and 1 to 2^28 columns.
    """

def unpack_block_sparse(
    values: NDArray[np.int8], indices: NDArray[np.uint16], starts: NDArray[np.int64], k: int, n: int
) -> NDArray[np.int8]:
    """Return the dense [k, n] matrix.

    Raises:
        ValueError: the tensors are malformed.
    """

MOST_SAMPLED_TOKENS: int  # the largest vocabulary that `sample_rows` takes

class SamplingRow:
    """Options and history of one sequence (src/sampling.h)."""

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        choice: int = 0,
        logprobs: int = -1,
        prompt: Sequence[int] = (),
        bias_tokens: Sequence[int] = (),
        bias_values: Sequence[float] = (),
    ) -> None:
        """Check the options, and count the tokens of the prompt if a penalty needs them.

        Args:
            temperature: Values below 1e-6 choose the most likely token.
            top_k: 0: all tokens.
            top_p: Above 0, at most 1.
            min_p: 0 to 1.
            repetition_penalty: Above 0.
            presence_penalty: Any finite number.
            frequency_penalty: Any finite number.
            seed: The key of the random generator, 0 to 2^64 - 1.
            choice: The index among the answers to one prompt, 0 to 2^32 - 1.
            logprobs: The number of best tokens to report; -1: report no logprobs.
            prompt: Tokens.
            bias_tokens: Tokens with a bias.
            bias_values: The value to add to the logit of each.

        Raises:
            ValueError: An option or a token is out of range.
        """
    @property
    def generated(self) -> int:
        """The number of tokens in the answer."""
    def append(self, token: int) -> None:
        """Add a token to the answer."""

def sample_rows(
    logits: NDArray[np.float32], rows: Sequence[SamplingRow], masks: Sequence[NDArray[np.uint32] | None] = ()
) -> list[int | tuple[int, float, list[int], list[float]] | str]:
    """Choose a token for each row of logits [rows, vocabulary], without the GIL.

    Args:
        logits: Each row's logits.
        rows: Each row's options and history. No other thread may append to them during the call.
        masks: Empty, or for each row the allowed tokens: bit t % 32 of word t // 32; None: all tokens. Tokens beyond
            the last word are not allowed.

    Returns:
        For each row: the token; (token, logprob, best tokens, their logprobs) if the row asks for logprobs; or a text
        that describes what is wrong with the logits.

    Raises:
        ValueError: Shapes do not match.
    """
