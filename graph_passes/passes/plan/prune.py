"""Options of pass prune, and the layers that they select."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.errors import RecipeError

from ...find.linear import Linear
from ...find.quantized_weight import MAX_INPUTS
from ...options import Globs, PassOptions, takes
from ...weights.pruners.masks import MAX_OF_GROUP, Pattern
from ...weights.quantizers.grid import GROUP_SIZES, Quantization

_METHODS = ("magnitude", "wanda", "sparsegpt")
SPARSITY_TOLERANCE = 1e-3  # tolerance of the sparsity given with an N:M pattern


@dataclass(frozen=True)
class PruneOptions(PassOptions):
    """Options of pass `prune`."""

    method: str = field(default="magnitude", metadata=takes("str", choices=_METHODS))
    # layer: every layer has this sparsity; global: one threshold for all layers; sensitivity: layers that lose less
    # accuracy are sparser (pruners/allocation.py).
    scope: str = field(default="layer", metadata=takes("str", choices=("layer", "global", "sensitivity")))
    pattern: str = field(default="unstructured", metadata=takes("str"))  # or "4x1", or "N:M"
    sparsity: float = field(default=0.5, metadata=takes("float", low=0.0, below=1.0))  # a pattern N:M has 1 - N / M
    # Adjust the kept weights to compensate for the pruned ones, by least squares over the inputs.
    repair: bool = field(default=False, metadata=takes("bool"))
    # sparsegpt: also quantize the kept weights, compensating for both errors. These are bits, group_size and symmetric
    # of pass quantize under other names, because option names must be unambiguous in a recipe with both passes.
    weight_bits: int | None = field(default=None, metadata=takes("int", choices=(4, 8), none=True))
    weight_group_size: int | None = field(default=None, metadata=takes("int", choices=GROUP_SIZES, none=True))
    zero_points: bool = field(default=False, metadata=takes("bool"))
    # wanda, sparsegpt, repair: record a layer's inputs with earlier layers pruned, or in the original. "original"
    # records many layers in one run of the model; "pruned" runs it in pieces (segments.py).
    inputs: str = field(default="pruned", metadata=takes("str", choices=("pruned", "original")))
    # sparsegpt, repair: added to the diagonal of X^T X, as a fraction of its mean. None: chosen for each layer by
    # cross-validation on two halves of the feeds.
    damping: float | None = field(default=None, metadata=takes("float", low=1e-4, below=100.0, none=True))
    layers: dict[str, float] = field(default_factory=dict, metadata=takes("numbers_by_glob", low=0.0, below=1.0))
    # Skip layers that already have this fraction of zeros in the pattern, from pruning in training.
    keep_sparse: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = self.units
        if pattern.of and (self.scope != "layer" or self.layers):
            found = f"scope is {self.scope!r}" if self.scope != "layer" else "layers is given"
            raise RecipeError(f"{found}, but with pattern {self.pattern!r} all layers have one sparsity; leave it out")
        implied = 1 - pattern.kept / pattern.of if pattern.of else self.sparsity
        if abs(implied - self.sparsity) > SPARSITY_TOLERANCE:
            raise RecipeError(
                f"sparsity is {self.sparsity:g}, expected {implied:g}, which pattern {self.pattern!r} has"
            )
        if self.scope == "global" and self.method != "magnitude":
            raise RecipeError(
                f"scope is 'global', expected 'layer' or 'sensitivity' with method = {self.method!r}, whose scores "
                "cannot be compared between layers"
            )
        if self.weight_bits is not None and self.method != "sparsegpt":
            raise RecipeError(
                f"weight_bits is {self.weight_bits}, which needs method = 'sparsegpt'; or use pass quantize"
            )
        if self.weight_bits != 4 and (self.weight_group_size is not None or self.zero_points):
            name = "weight_group_size" if self.weight_group_size is not None else "zero_points"
            raise RecipeError(f"{name} is {getattr(self, name)!r}, which needs weight_bits = 4; leave it out")
        if self.weight_bits is not None and self.repair:
            raise RecipeError("repair is true, expected false with weight_bits, which already compensates for pruning")
        if self.damping is not None and self.method != "sparsegpt" and not self.repair:
            raise RecipeError(f"damping is {self.damping:g}, which needs method = 'sparsegpt' or repair; leave it out")

    @property
    def units(self) -> Pattern:
        """Return the pattern. Raise RecipeError if it is invalid."""
        pattern = Pattern.read(self.pattern)
        if pattern is None:
            raise RecipeError(
                f"pattern is {self.pattern!r}, expected 'unstructured', '4x1', or 'N:M' with N < M <= {MAX_OF_GROUP}, "
                "such as '2:4'"
            )
        return pattern

    @property
    def needs_inputs(self) -> bool:
        """Return True if the options need recorded inputs of the layers."""
        return self.method != "magnitude" or self.repair or self.scope == "sensitivity"

    @property
    def quantization(self) -> Quantization | None:
        """Return how kept weights are quantized, or None."""
        if self.weight_bits is None:
            return None
        group_size = None if self.weight_bits == 8 else self.weight_group_size or 128
        narrow = self.weight_bits == 4 and not self.zero_points  # SparseAMXMatMul supports only bf16 scales
        return Quantization(self.weight_bits, group_size, symmetric=not self.zero_points, bf16_scales=narrow)

    def quantization_of(self, linear: Linear) -> Quantization | None:
        """Return how this pass quantizes the layer, or None. The caller handles layers that keep stored integers."""
        takes_it = linear.is_chosen(self.select, self.exclude) and linear.k <= MAX_INPUTS
        return self.quantization if takes_it else None
