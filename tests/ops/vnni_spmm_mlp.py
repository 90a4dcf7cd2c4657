"""One or two linear layers in one VNNISpMM node, and their expected output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from .block_sparse import BlockSparseLayer, HiddenLayer, Range
from .single_node import U
from .vnni_spmm_node import node_model


@dataclass(frozen=True)
class Mlp:
    """A linear layer, optionally after a hidden layer."""

    layer: BlockSparseLayer
    bias: np.ndarray
    x: Range
    hidden: HiddenLayer | None = None

    @classmethod
    def random(cls, rng: np.random.Generator, hidden_k: int, k: int, n: int, sparsity: float = 0.5) -> Mlp:
        """Return random layers. hidden_k: inputs of the hidden layer, or 0 for no hidden layer."""
        layer = BlockSparseLayer.random(rng, k, n, sparsity, scale=0.01)
        bias = rng.standard_normal(n, dtype=np.float32)
        if not hidden_k:
            return cls(layer, bias, Range(float(rng.random() / 50 + 0.01), int(rng.integers(256))))
        hidden = HiddenLayer.random(rng, hidden_k, k, sparsity)
        return cls(layer, bias, hidden.x, hidden)

    @property
    def width(self) -> int:
        return len(self.layer.q if self.hidden is None else self.hidden.layer.q)

    def check(self, y: np.ndarray, x: np.ndarray, *, float_sums: bool = False) -> None:
        """Check the output y for inputs x.

        float_sums: the integer sums may be float32 sums, as in the ONNX function.
        """
        if self.hidden is None:
            q, unsure, given = self.x.quantize(x).astype(np.int64), 0.0, self.x
        else:
            hidden = self.hidden
            low, high = hidden.table_indices(x, float_sums=float_sums)
            assert np.all(high - low <= 1) and np.mean(high != low) < 0.02
            q, other = (hidden.table[numbers].astype(np.int64) for numbers in (low, high))
            unsure, given = np.abs(q - other) @ np.abs(self.layer.q.astype(np.int64)), hidden.table_y
        centered, w, scales = q - given.zero_point, self.layer.q.astype(np.int64), given.scale64 * self.layer.scales
        exact = (centered @ w) * scales + self.bias
        magnitude = (np.abs(centered) @ np.abs(w) + unsure) * np.abs(scales) + np.abs(self.bias)
        count = len(w) + 8 if float_sums else 4
        assert y.shape == exact.shape and y.dtype == np.float32
        assert np.all(np.abs(y - exact) <= unsure * np.abs(scales) + count * U * magnitude)

    def model(self, **rest) -> onnx.ModelProto:
        given = {"hidden": self.hidden} if self.hidden is not None else {"x_range": self.x}
        return node_model(self.layer, self.bias, **given, **rest)
