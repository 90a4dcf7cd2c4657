"""Dense linear layers with random weights in ORT and PyTorch, for comparison.

    ort_matmul_fp32              ORT MatMul on float32 weights
    ort_matmul_nbits_<bits>      ORT MatMulNBits, accuracy_level 4: x is quantized to int8 by blocks; for given weights:
                                 matmul_nbits_node
    ort_dynamic_quantize_matmul  ORT DynamicQuantizeMatMul: uint8 x, int8 weights with one scale per column
    ort_matmul_integer           ORT MatMulInteger: uint8 x, int8 weights, int32 y, without scaling
    torch_bf16                   torch.nn.functional.linear on bf16 x and weights; rounding x to bf16 is not timed

Their times do not depend on the weights' values, so zeros do not matter.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ortolan.graph_passes.measure.timing import copies_to_stay_cold

from .cold_layers import Bind, Node, Run, TimedLayer, ort_candidate


def has_torch() -> bool:
    """Return whether PyTorch is installed."""
    return find_spec("torch") is not None


def torch_version() -> str:
    """Return the version of PyTorch."""
    return str(import_module("torch").__version__)


def random_floats(rng: np.random.Generator, k: int, n: int) -> np.ndarray:
    """Return float32 [k, n] between -0.5 and 0.5."""
    w = rng.random((k, n), dtype=np.float32)
    w -= 0.5
    return w


def ort_matmul_fp32(rng: np.random.Generator, k: int, n: int) -> TimedLayer:
    """Return ORT MatMul on a random weight [k, n]."""
    return ort_candidate(Node("MatMul", [random_floats(rng, k, n)]), k, n, distinct=True)


def ort_matmul_nbits(rng: np.random.Generator, k: int, n: int, bits: int, block_size: int) -> TimedLayer:
    """Return ORT MatMulNBits on a random weight [k, n]."""
    blocks = -(-k // block_size)
    weights = rng.integers(0, 256, (n, blocks, block_size * bits // 8), dtype=np.uint8)
    scales = rng.random((n, blocks), dtype=np.float32)
    return ort_candidate(_matmul_nbits(k, bits, block_size, 4, [weights, scales]), k, n, distinct=True)


def matmul_nbits_node(
    q: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None, block_size: int, accuracy_level: int
) -> Node:
    """Return ORT MatMulNBits on the weight scales (q - zero_points), q [k, n], uint8 from 0 to 15, or int8.

    scales: float32 [blocks, n]. zero_points: uint8 [blocks, n] from 0 to 15; None: 8 for uint8 q, 0 for int8 q.
    accuracy_level: See `make_matmul_nbits`.
    """
    k, n = q.shape
    blocks = len(scales)
    padded = np.zeros((n, blocks * block_size), np.uint8)
    scales = np.ascontiguousarray(scales.T)
    if q.dtype == np.int8:
        padded[:, :k] = q.T.view(np.uint8) ^ 128
        return _matmul_nbits(k, 8, block_size, accuracy_level, [padded.reshape(n, blocks, block_size), scales])
    padded[:, :k] = q.T
    constants = [_nibbles(padded).reshape(n, blocks, block_size // 2), scales]
    if zero_points is not None:
        padded = np.zeros((n, blocks + blocks % 2), np.uint8)
        padded[:, :blocks] = zero_points.T
        constants.append(_nibbles(padded))
    return _matmul_nbits(k, 4, block_size, accuracy_level, constants)


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Pack two values into a byte, the first one in the low half: [n, count] to [n, count / 2]."""
    pairs: np.ndarray = q[:, ::2] | q[:, 1::2] << 4
    return pairs


def _matmul_nbits(k: int, bits: int, block_size: int, accuracy_level: int, constants: list[np.ndarray]) -> Node:
    sizes = {"K": k, "N": len(constants[0]), "bits": bits, "block_size": block_size, "accuracy_level": accuracy_level}
    return Node("MatMulNBits", constants, "com.microsoft", sizes)


def ort_dynamic_quantize_matmul(rng: np.random.Generator, k: int, n: int) -> TimedLayer:
    """Return ORT DynamicQuantizeMatMul on a random weight [k, n]."""
    weights = rng.integers(-127, 128, (k, n), dtype=np.int8)
    scales = rng.random(n, dtype=np.float32)
    return ort_candidate(Node("DynamicQuantizeMatMul", [weights, scales], "com.microsoft"), k, n, distinct=True)


def ort_matmul_integer(rng: np.random.Generator, k: int, n: int) -> TimedLayer:
    """Return ORT MatMulInteger on a random weight [k, n]."""
    weights = rng.integers(-127, 128, (k, n), dtype=np.int8)
    return ort_candidate(Node("MatMulInteger", [weights]), k, n, distinct=True, types=(np.uint8, np.int32))


def torch_bf16(rng: np.random.Generator, k: int, n: int) -> TimedLayer:
    """Return PyTorch's linear layer on a random bf16 weight [k, n]."""
    torch: Any = import_module("torch")
    torch.manual_seed(int(rng.integers(2**31)))
    stored = 2 * k * n
    first = torch.empty((n, k), dtype=torch.bfloat16).uniform_(-0.5, 0.5)
    weights = [first, *(first.clone() for _ in range(copies_to_stay_cold(stored) - 1))]

    def open_torch(threads: int) -> Bind:
        def bind(x: np.ndarray) -> Run:
            torch.set_num_threads(threads)
            rounded = torch.from_numpy(x).to(torch.bfloat16)

            def run() -> None:
                with torch.inference_mode():
                    for weight in weights:
                        torch.nn.functional.linear(rounded, weight)

            return run

        return bind

    return TimedLayer(len(weights), stored, open_torch)
