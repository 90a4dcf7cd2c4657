"""The options of pass prune, and what they say of a layer before any pass runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.errors import RecipeError

from ...find.linear import Linear
from ...find.quantized_weight import MAX_INPUTS
from ...options import Globs, PassOptions, takes
from ...weights.pruners.masks import MOST_OF_GROUP, Pattern
from ...weights.quantizers.grid import GROUP_SIZES, Quantization

_METHODS = ("magnitude", "wanda", "sparsegpt")
SAME_SHARE = 1e-3  # shares of N:M need not be written with more digits


@dataclass(frozen=True)
class PruneOptions(PassOptions):
    method: str = field(default="magnitude", metadata=takes("str", choices=_METHODS))
    # layer: each has the sparsity; global: one threshold for all; sensitivity: layers that bear it are sparser
    # (pruners/allocation.py).
    scope: str = field(default="layer", metadata=takes("str", choices=("layer", "global", "sensitivity")))
    pattern: str = field(default="unstructured", metadata=takes("str"))  # or "4x1", or "N:M"
    sparsity: float = field(default=0.5, metadata=takes("float", low=0.0, below=1.0))  # N:M has its own, 1 - N / M
    # Whether the weights that are kept are changed to make up for those that go, by least squares over the inputs.
    repair: bool = field(default=False, metadata=takes("bool"))
    # sparsegpt: also rounds the weights that are kept, making up for both at once. As bits, group_size and symmetric of
    # pass quantize are for that; with other names, so that each has one owner in a recipe of both passes.
    weight_bits: int | None = field(default=None, metadata=takes("int", choices=(4, 8), none=True))
    weight_group_size: int | None = field(default=None, metadata=takes("int", choices=GROUP_SIZES, none=True))
    zero_points: bool = field(default=False, metadata=takes("bool"))
    # wanda, sparsegpt, repair: what a layer's inputs come from, layers in front of it that are pruned already, or the
    # model as it was. The latter is one run of the model for many layers, the former one in pieces (segments.py).
    inputs: str = field(default="pruned", metadata=takes("str", choices=("pruned", "original")))
    # sparsegpt, repair: what is added to the diagonal of X^T X, as a share of its mean. None: chosen for each layer, by
    # how weights fitted to half of the feeds do on the other half.
    damping: float | None = field(default=None, metadata=takes("float", low=1e-4, below=100.0, none=True))
    layers: dict[str, float] = field(default_factory=dict, metadata=takes("numbers_by_glob", low=0.0, below=1.0))
    # Layers of which this share is zero already, by the pattern, were pruned by training: they stay as they are.
    keep_sparse: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = self.units
        if pattern.of and (self.scope != "layer" or self.layers):
            found = f"scope is {self.scope!r}" if self.scope != "layer" else "layers is given"
            raise RecipeError(f"{found}, but with pattern {self.pattern!r} all layers have one sparsity; leave it out")
        share = 1 - pattern.kept / pattern.of if pattern.of else self.sparsity
        if abs(share - self.sparsity) > SAME_SHARE:
            raise RecipeError(
                f"sparsity is {self.sparsity:g}, but pattern {self.pattern!r} makes it {share:g}; set sparsity to that"
            )
        if self.scope == "global" and self.method != "magnitude":
            raise RecipeError(
                f"scope is 'global', expected 'layer' or 'sensitivity' with method = {self.method!r}, whose scores of "
                "different layers cannot be compared"
            )
        if self.weight_bits is not None and self.method != "sparsegpt":
            raise RecipeError(
                f"weight_bits is {self.weight_bits}, which only method = 'sparsegpt' has; or use pass quantize"
            )
        if self.weight_bits != 4 and (self.weight_group_size is not None or self.zero_points):
            name = "weight_group_size" if self.weight_group_size is not None else "zero_points"
            raise RecipeError(f"{name} is {getattr(self, name)!r}, which only weight_bits = 4 has; leave it out")
        if self.weight_bits is not None and self.repair:
            raise RecipeError("repair is true, expected false with weight_bits, which makes up for pruning by itself")
        if self.damping is not None and self.method != "sparsegpt" and not self.repair:
            raise RecipeError(f"damping is {self.damping:g}, which only sparsegpt and repair have; leave it out")

    @property
    def units(self) -> Pattern:
        """The pattern. Raises RecipeError if it is none."""
        pattern = Pattern.read(self.pattern)
        if pattern is None:
            raise RecipeError(
                f"pattern is {self.pattern!r}, expected 'unstructured', '4x1', or 'N:M' with N < M <= {MOST_OF_GROUP}, "
                "such as '2:4'"
            )
        return pattern

    @property
    def needs_inputs(self) -> bool:
        return self.method != "magnitude" or self.repair or self.scope == "sensitivity"

    @property
    def quantization(self) -> Quantization | None:
        if self.weight_bits is None:
            return None
        group_size = None if self.weight_bits == 8 else self.weight_group_size or 128
        narrow = self.weight_bits == 4 and not self.zero_points  # SparseAMXMatMul has no other scales
        return Quantization(self.weight_bits, group_size, symmetric=not self.zero_points, bf16_scales=narrow)

    def quantization_of(self, linear: Linear) -> Quantization | None:
        """How this step rounds the layer, unless it keeps numbers that the model stores; None: it does not."""
        takes_it = linear.is_chosen(self.select, self.exclude) and linear.k <= MAX_INPUTS
        return self.quantization if takes_it else None
