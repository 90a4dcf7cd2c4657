"""The options of pass activations, and what they say of a layer before any pass runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.errors import RecipeError

from ...find.linear import Linear
from ...find.sparse_inputs import is_sparse_by_itself
from ...options import Globs, PassOptions, takes


@dataclass(frozen=True)
class ActivationsOptions(PassOptions):
    # The share of each input that is to be zero. Neither this nor an error: only inputs that are sparse by themselves.
    sparsity: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    # The largest ||(x - x')W|| / ||xW|| of a layer, x' being what is left of its input x: the root mean square over
    # tokens, so that the few whose inputs are huge (a text's first one) do not decide. Of layers that share an input,
    # of each.
    error: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    max_numbers: int = field(default=1 << 18, metadata=takes("int", low=16))  # kept of each input, drawn at random
    max_rows: int = field(default=256, metadata=takes("int", low=1))  # error: inputs (tokens) on which it is measured
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity is not None and self.error is not None:
            raise RecipeError(
                f"sparsity is {self.sparsity:g} and error is {self.error:g}, expected one of them: each sets the "
                "thresholds; leave the other out"
            )

    @property
    def needs_feeds(self) -> bool:
        return self.sparsity is not None or self.error is not None

    def takes(self, linear: Linear) -> bool:
        """Whether this step chooses a threshold for the layer."""
        if not linear.is_chosen(self.select, self.exclude):
            return False
        if linear.int4 is not None or linear.int8 is not None:  # MaskedMatMul does not take such a weight
            return False
        return self.needs_feeds or is_sparse_by_itself(linear.x)
