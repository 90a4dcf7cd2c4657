"""What was done to a model and what it gained: as objects, as JSON, and as text (summary.py)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .figures import Timing
from .lines import WIDTH, number
from .page import save_page
from .summary import details, layer_table, summary

if TYPE_CHECKING:
    import onnx

    from .search import AutoReport

LayerStatus = Literal["replaced", "would replace", "pruned", "quantized", "kept"]


@dataclass
class LayerReport:
    """One linear layer, or a node that looks like one. Bytes are those of the weight (and of the packed tensors)."""

    name: str
    op: str
    new_op: str | None = None
    k: int | None = None
    n: int | None = None
    sparsity: float | None = None  # zeros / all, of the weight in the optimized model
    bytes_before: int | None = None
    bytes_after: int | None = None
    output_error: float | None = None  # ||XW - Y|| / ||XW|| for calibration inputs X and the new operator's Y
    status: LayerStatus = "kept"
    reason: str | None = None
    threshold: float | None = None  # inputs whose magnitude is not above it count as zero
    density: float | None = None  # the share of the inputs that is above it, on the calibration feeds
    weight_bits: int | None = None  # of a quantized weight: 8 or 4
    storage: str | None = None  # of a weight in SparseAMXMatMul: "dense", "bitmap" or "2:4"
    fused: list[str] = field(default_factory=list)  # what the new operator computes as well: "gelu", "residual", …

    @property
    def weights(self) -> str:
        """For people: "int8", "2:4 int8", "bf16", …; "" where nothing has changed."""
        kind = f"int{self.weight_bits}" if self.weight_bits else "bf16" if self.new_op else ""
        return f"2:4 {kind}" if kind and self.storage == "2:4" else kind

    @property
    def growth(self) -> int:
        return (self.bytes_after or 0) - (self.bytes_before or 0)


@dataclass
class LookupReport:
    """A chain of element-wise operators on a quantized value that one lookup replaces; or where none could begin."""

    name: str  # of the chain's last node, which the lookup keeps; of the first where there is none
    operators: list[str]
    entries: int | None = None  # of the table
    entry_type: str | None = None
    status: LayerStatus = "kept"
    reason: str | None = None  # why there is none


@dataclass
class OutputDeviation:
    """How far an output of the optimized model is from the reference, over all feeds."""

    name: str
    relative_l2: float
    cosine: float
    max_abs: float
    # Where only the original rounds activations: how far it is itself from its weights in float, and the new model.
    from_float: tuple[float, float] | None = None

    def describe(self) -> str:
        text = (
            f"relative error {number(self.relative_l2)}, cosine {self.cosine:.5f}, largest difference "
            f"{number(self.max_abs)}"
        )
        if self.from_float is None:
            return text
        before, after = map(number, self.from_float)
        return f"{text}; from its weights in float the original is {before} away, this model {after}"


@dataclass
class CacheReport:
    """Attention with a cache that pass compress_cache replaced. Bytes are those of a token, of all these together."""

    attentions: int
    keys: str
    values: str
    bytes_before: int
    bytes_after: int
    # Against the original, of tokens decoded from the cache, one a call, behind a prompt.
    decode_error: list[OutputDeviation] = field(default_factory=list)
    decoded_tokens: int | None = None  # so many
    prompt_tokens: int | None = None


@dataclass
class OptimizationReport:
    """The result of optimize_onnx. `print` it; `details()` and `table()` say more, `to_json()` has everything."""

    recipe: dict[str, Any]
    input: str | None = None
    output: str | None = None
    dry_run: bool = False
    portable: bool = True
    layers: list[LayerReport] = field(default_factory=list)
    lookups: list[LookupReport] = field(default_factory=list)  # by pass fuse_lut
    cache: CacheReport | None = None  # by pass compress_cache
    auto: AutoReport | None = None  # of a recipe that the search has found
    file_size_before: int | None = None
    file_size_after: int | None = None
    output_error: list[OutputDeviation] = field(default_factory=list)  # optimized against the original
    # Optimized against the pruned and quantized model before its layers were replaced: what operators round.
    rounding_error: list[OutputDeviation] = field(default_factory=list)
    portable_error: list[OutputDeviation] = field(default_factory=list)  # portable body against the native kernels
    latency_before: Timing | None = None  # one run of the first verification feed
    latency_after: Timing | None = None
    latency_cpus: int | None = None  # that this process may use: ONNX Runtime chooses the number of threads by them
    feeds: str | None = None
    judged_on: str | None = None  # which of these the errors of the outputs are of, if not of all
    tokens: int | None = None  # in the given feeds; None: none were given, or they are no tokens
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    cpu: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, OptimizationReport] = field(default_factory=dict)  # of a folder of several models, by file
    model: onnx.ModelProto | None = field(default=None, repr=False, compare=False)

    @property
    def replaced(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.status in ("replaced", "would replace")]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and texts. The model itself is left out; numbers that are not finite are None."""
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.name != "model"}
        plain: dict[str, Any] = _plain(fields)
        return plain

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page with tables and plots of all of this, without other files (needs jinja2 and matplotlib).

        Raises OrtolanError.
        """
        save_page(self.to_dict(), path)

    def __str__(self) -> str:
        return self.summary()

    def summary(self, width: int = WIDTH) -> str:
        """Return one line (speed, size, agreement, file), then facts, equal layers grouped; what `print` shows."""
        return summary(self, width)

    def details(self, width: int = WIDTH, table_width: int | None = None) -> str:
        """Return the summary, what was measured besides, and the table of all layers; what option -v shows.

        Args:
            width: Columns of text.
            table_width: Columns of the table, to which names of layers are folded; None: names stay whole.
        """
        return details(self, width, table_width)

    def table(self, width: int | None = None) -> str:
        """Return a table of the linear layers; width as `table_width` of `details`."""
        return layer_table(self, width)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
