"""Options of pass quantize, and the layers that they select."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.errors import RecipeError

from ...find.linear import Linear
from ...find.quantized_weight import MAX_INPUTS
from ...options import Globs, PassOptions, takes
from ...weights.quantizers.grid import GROUP_SIZES, GROUPS_OF_SUBGROUPS, SUBGROUP_SIZES, Quantization

ROUNDING = ("rtn", "mse", "gptq", "awq", "hqq")
ZERO_POINTS = ("fraction", "integer", "minimum")


@dataclass(frozen=True)
class QuantizeOptions(PassOptions):
    """Options of pass `quantize`."""

    # None: "rtn" with 8 bits, where better scales gain little, and "mse" with fewer.
    method: str | None = field(default=None, metadata=takes("str", choices=ROUNDING, none=True))
    bits: int = field(default=8, metadata=takes("int", choices=(4, 5, 6, 8)))
    # Inputs that share a scale; None: 256 with subgroups, else 128 with 4 bits, and a whole column with 8 bits.
    group_size: int | None = field(
        default=None, metadata=takes("int", choices=(*GROUP_SIZES, GROUPS_OF_SUBGROUPS[-1]), none=True)
    )
    # 4, 5 and 6 bits: inputs that share an integer scale and zero point, within a group (ops/formats/subgroup.h). None:
    # 16 with 5 and 6 bits, and no subgroups with 4 bits.
    subgroup_size: int | None = field(default=None, metadata=takes("int", choices=SUBGROUP_SIZES, none=True))
    # 8 bits: reduce the weights' range so that sums of two products fit 16 bits; faster on AVX2 CPUs without VNNI.
    reduce_range: bool = field(default=False, metadata=takes("bool"))
    # Groups have no zero points. None: true except for hqq, so that every operator supports the weight
    # (SparseAMXMatMul has no zero points). 4-bit errors are then about a sixth larger.
    symmetric: bool | None = field(default=None, metadata=takes("bool", none=True))
    # Offset of asymmetric groups. fraction (default): zero point in sixteenths. integer: the same size, with a fifth
    # more squared error. minimum: as accurate as fraction and one byte larger.
    zero_points: str | None = field(default=None, metadata=takes("str", choices=ZERO_POINTS, none=True))
    # gptq: added to the diagonal of X^T X, as a fraction of its mean. None: chosen for each layer by cross-validation
    # on two halves of the feeds.
    damping: float | None = field(default=None, metadata=takes("float", low=1e-4, below=100.0, none=True))
    # gptq: choose the order in which inputs are rounded, instead of the stored order. None: true.
    act_order: bool | None = field(default=None, metadata=takes("bool", none=True))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_subgroups()
        if self.bits == 8 and not self.quantization.symmetric:
            found = "method is 'hqq'" if self.method == "hqq" else "symmetric is false"
            raise RecipeError(f"{found}, which needs bits = 4: 8-bit weights have no zero points")
        if self.reduce_range and not self.has("reduce_range"):
            raise RecipeError(
                "reduce_range is true, which needs bits = 8, no group_size, and method = 'rtn' or no method"
            )
        if self.method == "hqq" and self.symmetric:
            raise RecipeError("symmetric is true, expected false with method = 'hqq', which optimizes zero points")
        if self.zero_points is not None and self.quantization.symmetric:
            raise RecipeError(
                f"zero_points is {self.zero_points!r}, which needs symmetric = false; set that, or leave zero_points "
                "out"
            )
        for name in ("damping", "act_order"):
            if self.method != "gptq" and getattr(self, name) is not None:
                raise RecipeError(f"{name} is {getattr(self, name)!r}, which needs method = 'gptq'; leave it out")

    def _check_subgroups(self) -> None:
        size = self.quantization.subgroup_size
        if size is None:
            if self.group_size == GROUPS_OF_SUBGROUPS[-1]:
                raise RecipeError(
                    f"group_size is {self.group_size}, which needs subgroup_size = 16 or 32; set that, or give "
                    f"{GROUP_SIZES[-1]}"
                )
            return
        with_subgroups = f"with {self.bits} bits" if self.subgroup_size is None else f"with subgroup_size = {size}"
        if self.bits == 8:
            raise RecipeError(f"subgroup_size is {size}, which needs bits = 4, 5 or 6; leave it out")
        if self.group_size not in (None, *GROUPS_OF_SUBGROUPS):
            expected = ", ".join(map(str, GROUPS_OF_SUBGROUPS))
            raise RecipeError(f"group_size is {self.group_size}, expected one of {expected} {with_subgroups}")
        if self.method == "hqq":
            raise RecipeError(
                f"method is 'hqq', which fits fractional zero points, but zero points are integers {with_subgroups}; "
                "give another method, or 4 bits without subgroup_size"
            )
        for name, found in (("symmetric", self.symmetric or None), ("zero_points", self.zero_points)):
            if found is not None:
                raise RecipeError(
                    f"{name} is {found!r}, expected no value {with_subgroups}, which always has integer zero points"
                )

    def has(self, name: str) -> bool:
        """Return True if the option has an effect, given the values of the other options."""
        if name == "subgroup_size":
            return self.bits != 8
        if name in ("symmetric", "zero_points"):
            return self.bits == 4 and self.subgroup_size is None
        if name == "reduce_range":
            return self.bits == 8 and self.group_size is None and self.rounding == "rtn"
        return name not in ("damping", "act_order") or self.method == "gptq"

    @property
    def rounding(self) -> str:
        """Return the method, or its default."""
        return self.method or ("rtn" if self.bits == 8 else "mse")

    @property
    def quantization(self) -> Quantization:
        """Return the format that the options describe."""
        if self.subgroup_size is not None or self.bits in (5, 6):
            size = self.subgroup_size or SUBGROUP_SIZES[0]
            inputs = self.group_size or GROUPS_OF_SUBGROUPS[-1]
            return Quantization(self.bits, inputs, symmetric=False, subgroup_size=size)
        symmetric = self.method != "hqq" if self.symmetric is None else self.symmetric
        group_size = self.group_size or (128 if self.bits == 4 else None)
        minimum = not symmetric and self.zero_points == "minimum"
        fractions = not symmetric and self.zero_points in (None, "fraction")
        return Quantization(
            self.bits, group_size, symmetric=symmetric, minimum=minimum, fractions=fractions, reduced=self.reduce_range
        )

    def quantization_of(self, linear: Linear) -> Quantization | None:
        """Return how this pass quantizes the layer, or None. The caller handles layers that keep stored integers."""
        takes_it = linear.is_chosen(self.select, self.exclude) and linear.k <= MAX_INPUTS
        return self.quantization if takes_it else None
