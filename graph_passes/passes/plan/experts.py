"""Options of pass experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...options import Globs, PassOptions, any_matches, takes
from ...weights.quantizers.grid import EIGHT_BIT_GROUP, GROUPS_OF_SUBGROUPS, SUBGROUP_SIZES, Quantization


@dataclass(frozen=True)
class ExpertsOptions(PassOptions):
    """Options of pass `experts`."""

    # Bits of experts that the model stores as floats; None: they are not replaced.
    expert_bits: int | None = field(default=None, metadata=takes("int", choices=(4, 5, 6, 8), none=True))
    # 4, 5 and 6 bits: inputs that share an integer scale and zero point.
    expert_subgroup_size: int = field(default=SUBGROUP_SIZES[0], metadata=takes("int", choices=SUBGROUP_SIZES))
    # Join experts that are separate layers to a mixture.
    join: bool = field(default=True, metadata=takes("bool"))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    @property
    def quantization(self) -> Quantization | None:
        """Return the format of experts that are stored as floats."""
        bits, size = self.expert_bits, self.expert_subgroup_size
        if bits is None or bits == 8:
            return None if bits is None else Quantization(8, EIGHT_BIT_GROUP)
        return Quantization(bits, GROUPS_OF_SUBGROUPS[-1], symmetric=False, subgroup_size=size)

    def is_chosen(self, name: str) -> bool:
        """Return True if the pass replaces the node with this name."""
        return any_matches([name], self.select) and not any_matches([name], self.exclude)
