"""Which layers a step replace takes, and with which numbers. An operator is one module and one line in REPLACEMENTS."""

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
    op: str = field(default="SparseAMXMatMul", metadata=takes("str", choices=tuple(REPLACEMENTS)))
    min_sparsity: float = field(default=0.0, metadata=takes("float", low=0.0, below=1.0))
    # Also layers whose packed weight is larger than what the file stores for it: small, dense or quantized ones.
    may_grow: bool = field(default=False, metadata=takes("bool"))
    # Whether the operator also takes over the activation function, the residual Add and the LayerNormalization behind a
    # layer, a layer of the same input whose output is multiplied with that, and, if pass ranges has run, the layer
    # behind the activation.
    fuse: bool = field(default=True, metadata=takes("bool"))
    # Which layers round their inputs by fixed ranges, if pass ranges has run. Those of MLPs must, to be one operator;
    # the others are as fast with a range for each token, and more exact.
    fixed_ranges: str = field(default="mlp", metadata=takes("str", choices=("mlp", "all")))
    # MaskedMatMul: how weights that are not quantized are stored; None: bf16.
    weights: str | None = field(default=None, metadata=takes("str", choices=("bf16", "float32"), none=True))
    # SparseAMXMatMul: "2:4" takes only layers that are 2:4 sparse, "small" stores bitmaps also where this CPU is slower
    # with them than with dense weights; None: what is fast on this CPU (operators/sparse_amx_matmul_storage.py).
    storage: str | None = field(default=None, metadata=takes("str", choices=(TWO_FOUR, SMALL), none=True))
    # SparseAMXMatMul, W8A8MatMul: takes only layers of 4 or 8 bits, also those that the model stores, number by number.
    keep_quantized: bool = field(default=False, metadata=takes("bool"))
    # SparseAMXMatMul and W8A8MatMul: whether numbers of 4 or 8 bits that the model stores are kept, beside weights that
    # are floats or that a pass has quantized.
    keep_stored: bool = field(default=False, metadata=takes("bool"))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None and self.op != MASKED_MATMUL:
            raise RecipeError(f"weights is {self.weights!r}, which only op = {MASKED_MATMUL!r} has; leave it out")
        if self.storage is not None and self.op != SPARSE_AMX_MATMUL:
            raise RecipeError(f"storage is {self.storage!r}, which only op = {SPARSE_AMX_MATMUL!r} has; leave it out")
        for name in ("keep_quantized", "keep_stored"):
            if getattr(self, name) and self.op not in (SPARSE_AMX_MATMUL, W8A8_MATMUL):
                raise RecipeError(
                    f"{name} is true, which only op = {SPARSE_AMX_MATMUL!r} and {W8A8_MATMUL!r} have; leave it out"
                )

    def has(self, name: str) -> bool:
        if name == "fixed_ranges":
            return REPLACEMENTS[self.op].takes_ranges
        operators = {
            "weights": (MASKED_MATMUL,),
            "storage": (SPARSE_AMX_MATMUL,),
            "keep_quantized": (SPARSE_AMX_MATMUL, W8A8_MATMUL),
            "keep_stored": (SPARSE_AMX_MATMUL, W8A8_MATMUL),
        }
        return self.op in operators.get(name, REPLACEMENTS)


@dataclass(frozen=True)
class LayerState:
    """What passes have made of a layer so far."""

    bytes_before: int  # of its weight in the file, before any pass
    quantized: Quantization | None = None  # the numbers that a pass has chosen
    threshold: float | str | None = None  # of its input, or why there is none; see activations.py
    stored_bits: int | None = None  # of its weight in the file; None: floats


class ReplaceRule:
    """What one step replace does with a layer: this follows from the step's options, the layer and its state."""

    def __init__(self, options: ReplaceOptions) -> None:
        self.options = options
        self.replacement = REPLACEMENTS[options.op]()
        if options.weights is not None:
            self.replacement.weights = options.weights
        self.replacement.storage, self.replacement.keeps_quantized = options.storage, self._keeps
        self.fuses = options.fuse and self.replacement.has_epilogue

    @property
    def _keeps(self) -> bool:
        return self.options.keep_quantized or self.options.keep_stored

    def is_chosen(self, linear: Linear) -> bool:
        return linear.is_chosen(self.options.select, self.options.exclude)

    def stored_weight(self, linear: Linear) -> StoredInt4 | StoredInt8 | None:
        """The numbers of 4 or 8 bits that the model stores for the layer, if the operator takes them over."""
        found = linear.int8 if linear.int4 is None else linear.int4
        if not isinstance(found, StoredInt4 | StoredInt8) or not self.is_chosen(linear):
            return None
        if self.options.keep_stored and self.refuses_range(linear):  # a pass quantizes them again
            return None
        return found if self.replacement.why_not(linear.k, found) is None else None

    def quantization(self, linear: Linear, state: LayerState) -> Quantization | None:
        """How the numbers are quantized that the operator takes over; None: they are floats."""
        return self.stored_weight(linear) if state.quantized is None else state.quantized

    def packed_bytes(self, linear: Linear, stored: Stored, state: LayerState) -> int:
        """About, of a weight of which this is stored."""
        return self.replacement.packed_bytes(linear.k, linear.n, stored, self.quantization(linear, state))

    def refuses_range(self, linear: Linear) -> bool:
        """Whether the layer's input has a fixed range, which the operator would replace by a range for each row."""
        return self._keeps and self.options.storage != TWO_FOUR and linear.x_range is not None

    def why_not(self, linear: Linear, stored: Stored, state: LayerState) -> str | None:
        """Why a layer of whose weight this is stored is left as it is, if it is."""
        if not linear.matches(self.options.select):
            return "not selected"
        if linear.matches(self.options.exclude):
            return "excluded from replacement"
        if problem := self._why_not_masked(state.threshold):
            return problem
        if self.options.storage == TWO_FOUR and not stored.is_two_four:
            return f"{stored.beyond_two_four}, expected 2 of 4 at most; give sparsity=0.5, which prunes to that"
        if self.options.keep_quantized and self.refuses_range(linear) and self.quantization(linear, state) is not None:
            return f"its input has a fixed range, which {self.options.op} does not take"
        if self.options.keep_quantized and self.quantization(linear, state) is None:
            return linear.why_not_stored or (
                "it is not quantized; weights='int8' and 'int4' quantize it, and keep weights that are stored in as "
                "many bits"
            )
        sparsity = 1 - stored.count / (linear.k * linear.n)
        if sparsity < self.options.min_sparsity:
            return f"sparsity {sparsity:.3g} is below min_sparsity {self.options.min_sparsity:g}"
        packed = self.packed_bytes(linear, stored, state)
        # In the same bits a weight grows by scales, and by no more than whole panels and tiles, which is little, or of
        # little.
        quantization = self.quantization(linear, state)
        adopted = isinstance(quantization, StoredInt4 | StoredInt8)
        same_bits = quantization is not None and quantization.bits == state.stored_bits
        if packed > state.bytes_before and not (adopted or same_bits or self.options.may_grow):
            form = self.replacement.weights if quantization is None else f"int{quantization.bits}"
            stored_as_it_is = "leave weights out to keep what the model stores"
            keep = "" if state.stored_bits is None else f"{linear.why_not_stored or stored_as_it_is}; "
            return (
                f"packed, its weight would take {human_bytes(packed)} in {form}, more than the "
                f"{human_bytes(state.bytes_before)} it takes now ({keep}may_grow=true replaces it all the same)"
            )
        return None

    def _why_not_masked(self, threshold: float | str | None) -> str | None:
        """Why the operator cannot do with the layer's inputs what pass `activations` wants, if it cannot."""
        chosen = isinstance(threshold, float)
        if not self.replacement.masks_inputs:
            return f"only {MASKED_MATMUL} applies the threshold of its inputs" if chosen else None
        return None if chosen else str(threshold or "no pass 'activations' selects it")
