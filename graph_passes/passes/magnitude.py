"""Find the smallest weights of one or several tensors without sorting, and set them to zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError

from ..find.constants import lazy

# A weight's key is its float32 magnitude as an integer, which has the same order.
_MAGNITUDE_BITS = np.uint32(0x7FFFFFFF)


_INFINITY_KEY = 0x7F800000


_CHUNK = 1 << 22


@dataclass(frozen=True)
class Threshold:
    """Weights with a smaller key become zero, and the first `ties` weights with this key."""

    key: int
    ties: int


@dataclass
class Tally:
    """Counts of a tensor's weights."""

    below: int = 0
    equal: int = 0
    zeros: int = 0


def find_threshold(weights: Sequence[ir.TensorProtocol], names: Sequence[str], count: int) -> Threshold:
    """Return the threshold that prunes the `count` smallest of all weights together.

    Two histograms, over the upper and the lower half of the keys, need two passes over the weights.

    Raises:
        ModelError: a weight is NaN or infinity.
    """

    def histogram(key_bin: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        total = np.zeros(1 << 16, np.int64)
        for weight, name in zip(weights, names, strict=True):
            for keys in _key_chunks(weight):
                if keys.max(initial=0) >= _INFINITY_KEY:
                    raise ModelError(
                        f"weight {name!r} holds NaN or infinity, so it cannot be pruned; export the model "
                        "again, or exclude this layer"
                    )
                total += np.bincount(key_bin(keys), minlength=1 << 16)
        return total

    upper_counts = np.cumsum(histogram(lambda keys: keys >> 16))
    upper = int(np.searchsorted(upper_counts, count))
    remaining = count - (int(upper_counts[upper - 1]) if upper else 0)
    lower_counts = np.cumsum(histogram(lambda keys: keys[keys >> 16 == upper] & 0xFFFF))
    lower = int(np.searchsorted(lower_counts, remaining))
    return Threshold(upper << 16 | lower, remaining - (int(lower_counts[lower - 1]) if lower else 0))


def tally_weight(weight: ir.TensorProtocol, key: int) -> Tally:
    """Count the weights below a key, equal to it, and zero."""
    tally = Tally()
    for keys in _key_chunks(weight):
        tally.below += int(np.count_nonzero(keys < key))
        tally.equal += int(np.count_nonzero(keys == key))
        tally.zeros += int(np.count_nonzero(keys == 0))
    return tally


def pruned_tensor(weight: ir.TensorProtocol, threshold: Threshold) -> ir.LazyTensor:
    """Return the weight with its smallest values set to zero, computed on access."""

    def compute() -> np.ndarray:
        result = np.array(weight.numpy())
        flat = result.reshape(-1)
        ties = threshold.ties
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            keys = _keys(chunk)
            equal = np.flatnonzero(keys == threshold.key)[:ties]
            ties -= len(equal)
            chunk[keys < threshold.key] = 0
            chunk[equal] = 0
        return result

    return lazy(compute, weight.dtype, ir.Shape(weight.shape.numpy()))


def _key_chunks(weight: ir.TensorProtocol) -> Iterator[np.ndarray]:
    flat = np.asarray(weight.numpy()).reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield _keys(flat[start : start + _CHUNK])


def _keys(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint32) & _MAGNITUDE_BITS
