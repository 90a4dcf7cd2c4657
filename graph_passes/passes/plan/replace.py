"""Rules of pass replace: the layers that a step takes, and how their weights are stored.

A new operator is one module and one line in REPLACEMENTS.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.errors import RecipeError

from ...find.linear import Linear
from ...find.stored_int4 import StoredInt4
from ...find.stored_int8 import StoredInt8
from ...operators.masked_matmul import MaskedMatMul
from ...operators.masked_matmul_function import OP_TYPE as MASKED_MATMUL
from ...operators.replacement import Replacement, Stored
from ...operators.sparse_amx_matmul import SparseAMXMatMul
from ...operators.sparse_amx_matmul_function import OP_TYPE as SPARSE_AMX_MATMUL
from ...operators.sparse_amx_matmul_storage import SMALL, TWO_FOUR
from ...operators.vnni_spmm import VNNISpMM
from ...operators.w4a8_matmul import W4A8MatMul
from ...operators.w4a8_matmul_function import OP_TYPE as W4A8_MATMUL
from ...operators.w8a8_matmul import W8A8MatMul
from ...operators.w8a8_matmul_function import OP_TYPE as W8A8_MATMUL
from ...options import Globs, PassOptions, takes
from ...report.figures import human_bytes
from ...weights.quantizers.grid import Quantization

REPLACEMENTS: dict[str, type[Replacement]] = {
    "SparseAMXMatMul": SparseAMXMatMul,
    "VNNISpMM": VNNISpMM,
    "W4A8MatMul": W4A8MatMul,
    "W8A8MatMul": W8A8MatMul,
    "MaskedMatMul": MaskedMatMul,
}


@dataclass(frozen=True)
class ReplaceOptions(PassOptions):
    """Options of pass `replace`."""

    op: str = field(default="SparseAMXMatMul", metadata=takes("str", choices=tuple(REPLACEMENTS)))
    min_sparsity: float = field(default=0.0, metadata=takes("float", low=0.0, below=1.0))
    # Also replace layers whose packed weight is larger than in the file.
    may_grow: bool = field(default=False, metadata=takes("bool"))
    # Let the operator also compute the activation, residual Add and LayerNormalization after a layer, the product of
    # gate and up projection, and, after pass ranges, both layers of an MLP.
    fuse: bool = field(default=True, metadata=takes("bool"))
    # Layers with fixed input ranges, if pass ranges has run. The two layers of an MLP need them to become one
    # operator. Other layers are as fast, and more accurate, with a range for each token.
    fixed_ranges: str = field(default="mlp", metadata=takes("str", choices=("mlp", "all")))
    # MaskedMatMul: type of weights that are not quantized; None: bf16.
    weights: str | None = field(default=None, metadata=takes("str", choices=("bf16", "float32"), none=True))
    # SparseAMXMatMul: "2:4" replaces only 2:4 sparse layers; "small" stores bitmaps even if dense weights are faster on
    # this CPU; None: the fastest on this CPU (operators/sparse_amx_matmul_storage.py).
    storage: str | None = field(default=None, metadata=takes("str", choices=(TWO_FOUR, SMALL), none=True))
    # SparseAMXMatMul, W8A8MatMul: replace only layers with 4-bit or 8-bit weights; stored integers are kept exactly.
    quantized_only: bool = field(default=False, metadata=takes("bool"))
    # SparseAMXMatMul, W8A8MatMul: keep stored 4-bit and 8-bit weights exactly, and also replace all other layers.
    keep_stored: bool = field(default=False, metadata=takes("bool"))
    # W4A8MatMul: let pass quantize round weights again that the model stores in 4 bits, instead of keeping them.
    requantize: bool = field(default=False, metadata=takes("bool"))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.requantize and self.op != W4A8_MATMUL:
            raise RecipeError(f"requantize is true, which needs op = {W4A8_MATMUL!r}; leave it out")
        if self.weights is not None and self.op != MASKED_MATMUL:
            raise RecipeError(f"weights is {self.weights!r}, which needs op = {MASKED_MATMUL!r}; leave it out")
        if self.storage is not None and self.op != SPARSE_AMX_MATMUL:
            raise RecipeError(f"storage is {self.storage!r}, which needs op = {SPARSE_AMX_MATMUL!r}; leave it out")
        for name in ("quantized_only", "keep_stored"):
            if getattr(self, name) and self.op not in (SPARSE_AMX_MATMUL, W8A8_MATMUL):
                raise RecipeError(
                    f"{name} is true, which needs op = {SPARSE_AMX_MATMUL!r} or {W8A8_MATMUL!r}; leave it out"
                )

    def has(self, name: str) -> bool:
        """Return True if the operator has this option."""
        if name == "fixed_ranges":
            return REPLACEMENTS[self.op].takes_ranges
        operators = {
            "weights": (MASKED_MATMUL,),
            "storage": (SPARSE_AMX_MATMUL,),
            "quantized_only": (SPARSE_AMX_MATMUL, W8A8_MATMUL),
            "keep_stored": (SPARSE_AMX_MATMUL, W8A8_MATMUL),
            "requantize": (W4A8_MATMUL,),
        }
        return self.op in operators.get(name, REPLACEMENTS)


@dataclass(frozen=True)
class LayerState:
    """State of a layer after the passes so far."""

    bytes_before: int  # size of its weight in the file, before any pass
    quantized: Quantization | None = None  # format of the weight that a pass has quantized
    threshold: float | str | None = None  # threshold of its input, or why it has no threshold
    stored_bits: int | None = None  # bits of its weight in the file; None: float


class ReplaceRule:
    """Decisions of one pass `replace`, based on its options, a layer and the layer's state."""

    def __init__(self, options: ReplaceOptions) -> None:
        self.options = options
        self.replacement = REPLACEMENTS[options.op]()
        if options.weights is not None:
            self.replacement.weights = options.weights
        self.replacement.storage, self.replacement.keeps_stored = options.storage, self._keeps
        self.fuses = options.fuse and self.replacement.has_epilogue

    @property
    def _keeps(self) -> bool:
        return self.options.quantized_only or self.options.keep_stored

    def is_chosen(self, linear: Linear) -> bool:
        """Return True if the options select the layer."""
        return linear.is_chosen(self.options.select, self.options.exclude)

    def stored_weight(self, linear: Linear) -> StoredInt4 | StoredInt8 | None:
        """Return the layer's stored 4-bit or 8-bit weight, if the operator keeps it."""
        found = linear.int8 if linear.int4 is None else linear.int4
        if not isinstance(found, StoredInt4 | StoredInt8) or not self.is_chosen(linear) or self.options.requantize:
            return None
        if self.options.keep_stored and self.refuses_range(linear):  # pass quantize rounds it again
            return None
        return found if self.replacement.why_not(linear.k, found) is None else None

    def quantization(self, linear: Linear, state: LayerState) -> Quantization | None:
        """Return the format of the weight that is packed for the operator; None: float."""
        return self.stored_weight(linear) if state.quantized is None else state.quantized

    def packed_bytes(self, linear: Linear, stored: Stored, state: LayerState) -> int:
        """Return the approximate packed size of a weight that is `stored`."""
        return self.replacement.packed_bytes(linear.k, linear.n, stored, self.quantization(linear, state))

    def refuses_range(self, linear: Linear) -> bool:
        """Return True if the layer's input has a fixed range, which the operator would replace by a range per row."""
        return self._keeps and self.options.storage != TWO_FOUR and linear.x_range is not None

    def why_not(self, linear: Linear, stored: Stored, state: LayerState) -> str | None:
        """Explain why the layer is not replaced once its weight is `stored`; None if it is."""
        if not linear.matches(self.options.select):
            return "not selected"
        if linear.matches(self.options.exclude):
            return "excluded from replacement"
        if problem := self._why_not_masked(state.threshold):
            return problem
        if self.options.storage == TWO_FOUR and not stored.is_two_four:
            return f"{stored.beyond_two_four}, expected at most 2 of 4; sparsity=0.5 prunes to that"
        if self.options.quantized_only and self.refuses_range(linear) and self.quantization(linear, state) is not None:
            return f"its input has a fixed range, which {self.options.op} does not support"
        if self.options.quantized_only and self.quantization(linear, state) is None:
            return linear.why_not_stored or (
                "it is not quantized; weights='int8' and weights='int4' quantize it, and keep weights that are stored "
                "in this format"
            )
        sparsity = 1 - stored.count / (linear.k * linear.n)
        if sparsity < self.options.min_sparsity:
            return f"sparsity {sparsity:.3g} is below min_sparsity {self.options.min_sparsity:g}"
        quantization = self.quantization(linear, state)
        if problem := self.replacement.why_not(linear.k, quantization):
            return problem
        packed = self.packed_bytes(linear, stored, state)
        # With the same number of bits, only scales and padding to panels and tiles grow, which is little in total.
        adopted = isinstance(quantization, StoredInt4 | StoredInt8)
        same_bits = quantization is not None and quantization.bits == state.stored_bits
        if packed > state.bytes_before and not (adopted or same_bits or self.options.may_grow):
            kind = self.replacement.weights if quantization is None else f"int{quantization.bits}"
            advice = "leave weights out to keep what the model stores"
            keep = "" if state.stored_bits is None else f"{linear.why_not_stored or advice}; "
            return (
                f"its packed weight would take {human_bytes(packed)} in {kind}, more than the "
                f"{human_bytes(state.bytes_before)} in the file ({keep}may_grow=true replaces it anyway)"
            )
        return None

    def _why_not_masked(self, threshold: float | str | None) -> str | None:
        chosen = isinstance(threshold, float)
        if not self.replacement.masks_inputs:
            return f"its inputs have a threshold, which only {MASKED_MATMUL} applies" if chosen else None
        return None if chosen else str(threshold or "no pass 'activations' selects it")
