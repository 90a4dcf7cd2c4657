"""Options of pass activations, and the layers that they select."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.errors import RecipeError

from ...find.linear import Linear
from ...find.sparse_inputs import is_sparse_by_itself
from ...options import Globs, PassOptions, takes


@dataclass(frozen=True)
class ActivationsOptions(PassOptions):
    """Options of pass `activations`."""

    # Fraction of each input that becomes zero. Without `sparsity` and `error`, only inputs that are already sparse get
    # a threshold, which is 0.
    sparsity: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    # Largest ||(x - x')W|| / ||xW|| of each layer with input x and masked input x'. It is the root mean square over
    # tokens, so that few tokens with huge inputs (such as the first of a text) do not dominate.
    error: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    max_values: int = field(default=1 << 18, metadata=takes("int", low=16))  # values sampled from each input
    max_rows: int = field(default=256, metadata=takes("int", low=1))  # inputs (tokens) on which `error` is measured
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity is not None and self.error is not None:
            raise RecipeError(
                f"sparsity is {self.sparsity:g} and error is {self.error:g}, expected only one: each sets the "
                "thresholds; leave one out"
            )

    @property
    def needs_feeds(self) -> bool:
        """Return True if thresholds are chosen from calibration inputs."""
        return self.sparsity is not None or self.error is not None

    def takes(self, linear: Linear) -> bool:
        """Return True if this pass chooses a threshold for the layer."""
        if not linear.is_chosen(self.select, self.exclude):
            return False
        if linear.int4 is not None or linear.int8 is not None:  # MaskedMatMul does not support quantized weights
            return False
        return self.needs_feeds or is_sparse_by_itself(linear.x)
