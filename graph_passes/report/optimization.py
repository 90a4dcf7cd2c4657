"""The report of an optimization, as objects, JSON and text.

The text is a summary: one headline (speed, size, similarity, file), then one fact per line, with equal layers grouped.

`details()` adds the search's trials, the fused operations, the operators and a table of all layers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .figures import Timing, human_bytes
from .lines import WIDTH, Fact, count, factor, first_of, largest, lay_out, number, percent, table, wrap
from .page import save_page

if TYPE_CHECKING:
    import onnx

    from .search import AutoReport

_REASONS_SHOWN = 5  # number of reasons in the summary, for each kind of fact
_OUTPUTS_SHOWN = 3  # number of outputs in the summary; a decoder has two outputs per layer
_SIZES_SHOWN = 4  # number of layer sizes in the summary, for each format
SPARSE = 0.3  # least fraction of zeros of a weight that is called sparse; quantization alone makes fewer
_STORED_SPARSE = 0.05  # the same limit for weights that are stored without their zeros
_SPARSE_OPERATOR = "VNNISpMM"
_BUSY = 2  # a median above this multiple of the fastest run means a busy machine
_LEFT = ("layer", "op", "new op", "format", "status")  # left-aligned columns
# Columns that are shown once above the table if all layers have the same value.
_SHARED_COLUMNS = ("op", "new op", "format", "sparsity", "status")

LayerStatus = Literal["replaced", "would replace", "pruned", "quantized", "kept"]


@dataclass
class LayerReport:
    """One linear layer, or a node with a layer's operator that is not one; `reason` tells why it is not replaced.

    bytes_before: size of the weight; bytes_after: size of the packed tensors.
    """

    name: str
    op: str
    new_op: str | None = None
    k: int | None = None
    n: int | None = None
    sparsity: float | None = None  # fraction of zeros in the optimized model's weight
    bytes_before: int | None = None
    bytes_after: int | None = None
    output_error: float | None = None  # ||XW - Y|| / ||XW|| for calibration inputs X and the new operator's output Y
    status: LayerStatus = "kept"
    reason: str | None = None
    threshold: float | None = None  # inputs with at most this magnitude count as 0
    density: float | None = None  # fraction of the calibration inputs above the threshold
    weight_bits: int | None = None  # 8 or 4 for a quantized weight, else None
    storage: str | None = None  # storage of SparseAMXMatMul's weight: "dense", "bitmap" or "2:4"
    # operations that the new operator also computes: "gelu", "residual", …
    fused: list[str] = field(default_factory=list)

    @property
    def weights(self) -> str:
        """The weight format for display ("int8", "2:4 int8", "bf16", …); "" if the layer is unchanged."""
        kind = f"int{self.weight_bits}" if self.weight_bits else "bf16" if self.new_op else ""
        return f"2:4 {kind}" if kind and self.storage == "2:4" else kind

    @property
    def growth(self) -> int:
        """Number of bytes by which the weight grew; negative if it shrank."""
        return (self.bytes_after or 0) - (self.bytes_before or 0)


@dataclass
class LookupReport:
    """A chain of element-wise operators on a quantized value, which one lookup table may replace."""

    name: str  # the node that is replaced by the lookup, or else the chain's first node
    operators: list[str]
    entries: int | None = None  # number of entries of the table
    entry_type: str | None = None
    status: LayerStatus = "kept"
    reason: str | None = None  # why the chain was not replaced


@dataclass
class OutputDeviation:
    """The difference between one output of the optimized model and the reference, over all feeds."""

    name: str
    relative_l2: float
    cosine: float
    max_abs: float
    # Relative errors of the original and the optimized model against the model with float weights, if measured.
    from_float: tuple[float, float] | None = None

    def describe(self) -> str:
        """Return the errors in words."""
        text = (
            f"relative error {number(self.relative_l2)}, cosine {self.cosine:.5f}, largest difference "
            f"{number(self.max_abs)}"
        )
        if self.from_float is None:
            return text
        before, after = map(number, self.from_float)
        return f"{text}; relative error against float weights: original {before}, optimized {after}"


@dataclass
class CacheReport:
    """The attention layers whose KV cache pass compress_cache replaced. Sizes are bytes per token, over all layers."""

    attentions: int
    keys: str
    values: str
    bytes_before: int
    bytes_after: int
    # Deviation from the original for tokens that are decoded one by one after a prompt.
    decode_error: list[OutputDeviation] = field(default_factory=list)
    decoded_tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass
class OptimizationReport:
    """The result of `optimize_onnx`.

    `print` shows the summary; `details()` and `table()` show more, `to_json()` everything.
    """

    recipe: dict[str, Any]
    input: str | None = None
    output: str | None = None
    dry_run: bool = False
    portable: bool = True
    layers: list[LayerReport] = field(default_factory=list)
    lookups: list[LookupReport] = field(default_factory=list)  # results of pass fuse_lut
    cache: CacheReport | None = None  # result of pass compress_cache
    auto: AutoReport | None = None  # set if a search found the recipe
    file_size_before: int | None = None
    file_size_after: int | None = None
    output_error: list[OutputDeviation] = field(default_factory=list)  # optimized model compared with the original
    # Errors of rounding inside the kernels: the optimized model compared with the pruned and quantized model whose
    # layers are not yet replaced.
    rounding_error: list[OutputDeviation] = field(default_factory=list)
    # Optimized model run with ONNX functions, compared with the same model run with native kernels.
    portable_error: list[OutputDeviation] = field(default_factory=list)
    latency_before: Timing | None = None  # time of one run on the first verification feed
    latency_after: Timing | None = None
    latency_cpus: int | None = None  # number of CPUs that this process may use
    latency_threads: int | None = None  # threads of each of the two timed sessions
    latency_padding: tuple[int, int] | None = None  # (padding tokens, all tokens) of the timed feed
    feeds: str | None = None
    judged_on: str | None = None  # feeds on which output errors were measured, if not all
    tokens: int | None = None  # number of tokens in the given feeds; None: unknown
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    cpu: dict[str, Any] = field(default_factory=dict)
    # The report of each file, for a folder with several models.
    parts: dict[str, OptimizationReport] = field(default_factory=dict)
    model: onnx.ModelProto | None = field(default=None, repr=False, compare=False)

    @property
    def replaced(self) -> list[LayerReport]:
        """The layers that were replaced, or that a dry run would replace."""
        return [layer for layer in self.layers if layer.status in ("replaced", "would replace")]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, numbers and strings, without the model. NaN and infinity become None."""
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.name != "model"}
        plain: dict[str, Any] = _plain(fields)
        return plain

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page with tables and plots (needs jinja2 and matplotlib).

        Raises:
            OrtolanError: A package is missing, or the file cannot be written.
        """
        save_page(self.to_dict(), path)

    def __str__(self) -> str:
        return self.summary()

    def summary(self, width: int = WIDTH) -> str:
        """Return the text that `print` shows: a headline, then one fact a line, with equal layers grouped."""
        return _summary(self, width)

    def details(self, width: int = WIDTH, table_width: int | None = None) -> str:
        """Return the text that option -v shows: the summary, further measurements, and the table of all layers.

        Args:
            width: Columns of the text.
            table_width: Columns of the table; long layer names get a line of their own. None: no limit.
        """
        return _details(self, width, table_width)

    def table(self, width: int | None = None) -> str:
        """Return a table of the linear layers; width: see `table_width` of `details`."""
        return _layer_table(self, width)


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


# ---- text ------------------------------------------------------------------------------------------------------------


def _summary(report: OptimizationReport, width: int = WIDTH) -> str:
    hint = ("details", "option -v or report.details() lists every layer")
    return _text(report, width, lambda part: [*_facts(part, _REASONS_SHOWN), hint] if part.layers else _facts(part))


def _details(report: OptimizationReport, width: int = WIDTH, table_width: int | None = None) -> str:

    def everything(part: OptimizationReport) -> list[Fact]:
        return _facts(part) + _rounding_facts(part) + _operator_facts(part) + _search_details(part)

    text = _text(report, width, everything)
    layers = _layer_table(report, table_width)
    return f"{text}\n\n{layers}" if layers else text


def _layer_table(report: OptimizationReport, width: int | None = None) -> str:
    """Return a table with one row per linear layer, below a line with the values that all layers share."""
    if report.parts:
        tables = {name: _layer_table(part, width) for name, part in report.parts.items()}
        return "\n\n".join(f"{name}\n{text}" for name, text in tables.items() if text)
    columns = _columns(report)
    rows = len(columns["layer"])
    if not rows:
        return ""
    alike = {name: columns[name][0] for name in _SHARED_COLUMNS if rows > 1 and len(set(columns[name])) == 1}
    shared = ", ".join(f"{name} {cell}" for name, cell in alike.items() if cell)
    shown = table({name: cells for name, cells in columns.items() if name not in alike}, _LEFT, width)
    return f"{lay_out([('all layers', shared)], width or WIDTH)}\n{shown}" if shared else shown


def _zeros(report: OptimizationReport, layer: LayerReport) -> float | None:
    """Return the fraction of zeros of a pruned or sparse weight. For other weights, return None."""
    if any(step.get("name") == "prune" for step in report.recipe.get("pass", ())):
        return layer.sparsity
    stored = layer.storage in ("bitmap", "2:4") or layer.new_op == _SPARSE_OPERATOR
    return layer.sparsity if (layer.sparsity or 0.0) >= (_STORED_SPARSE if stored else SPARSE) else None


def _text(report: OptimizationReport, width: int, facts: Callable[[OptimizationReport], list[Fact]]) -> str:
    head = wrap(_headline(report), width)
    if not report.parts:
        return f"{head}\n\n{lay_out(facts(report), width)}"
    of_parts = tuple(f"{name}: " for name in report.parts)
    notes = [("note", note) for note in report.notes if not note.startswith(of_parts)]
    blocks = [f"{name}\n{_text(part, width, facts)}" for name, part in report.parts.items()]
    return "\n\n".join([head, *blocks, *([lay_out(notes, width)] if notes else [])])


def _headline(report: OptimizationReport) -> str:
    file = f": {report.output}" if report.output else ""
    if not report.layers and not report.recipe.get("pass"):
        return (report.auto.outcome if report.auto is not None else "the model is unchanged") + file
    if report.dry_run:
        return f"dry run, nothing was written: {_products(report)}"
    gains = [_speed_gain(report), _size_gain(report), *_cache_gain(report), _similarity(report)]
    return (", ".join(gain for gain in gains if gain) or _products(report)) + file


def _products(report: OptimizationReport) -> str:
    verb = "would replace" if report.dry_run else "replaced"
    if not report.layers:
        return f"{verb} no matrix products"
    attention = sum(layer.k is None for layer in report.replaced)  # attention has no weight
    inside = f", {attention} of them in attention" if attention else ""
    return f"{verb} {len(report.replaced)} of {len(report.layers)} matrix products{inside}"


# ---- speed, size, accuracy -------------------------------------------------------------------------------------------


def _speedup(before: Timing, after: Timing) -> float:
    """Return the smaller of two speedups: of the fastest runs, and of the medians. They differ on a busy machine."""
    return min(before.min_ms / after.min_ms, before.median_ms / after.median_ms)


def _speed_gain(report: OptimizationReport) -> str:
    if report.latency_before and report.latency_after:
        return factor(_speedup(report.latency_before, report.latency_after), "faster", "slower", "the same speed")
    searched = report.auto
    return f"{searched.gain:.2f}x faster" if searched is not None and searched.gain is not None else ""


def _speed_facts(report: OptimizationReport) -> list[Fact]:
    """Return the speed that pass verify measured; if it measured none, the speed that the search measured."""
    before, after = report.latency_before, report.latency_after
    if before and after:
        decodes = report.cache is not None and report.cache.decoded_tokens is not None
        run = "one token: " if decodes else ""
        gain = factor(_speedup(before, after), "faster", "slower")
        facts = [
            ("speed", f"{run}{gain} (the smaller of these two ratios)"),
            ("", f"fastest run: {before.min_ms:.3g} -> {after.min_ms:.3g} ms"),
            ("", f"median: {before.median_ms:.3g} -> {after.median_ms:.3g} ms"),
        ]
        if any(one.median_ms > _BUSY * one.min_ms for one in (before, after)):
            facts.append(("", "times vary widely: the machine is busy; measure again when it is idle"))
        if report.latency_threads is not None:
            facts.append(("", f"{count(report.latency_threads, 'thread')} per model"))
        padding, tokens = report.latency_padding or (0, 0)
        if padding:
            facts.append(("", f"{padding} of {tokens} tokens of the timed inputs are padding"))
        return facts
    return report.auto.speed_facts() if report.auto is not None and report.auto.gain is not None else []


def _size_gain(report: OptimizationReport) -> str:
    before, after = report.file_size_before, report.file_size_after
    return factor(before / after, "smaller", "larger", "the same size") if before and after else ""


def _size_facts(report: OptimizationReport) -> list[Fact]:
    before, after = report.file_size_before, report.file_size_after
    if not before or not after:
        return []
    return [("size", f"{human_bytes(before)} -> {human_bytes(after)} ({factor(before / after, 'smaller', 'larger')})")]


def _cache_gain(report: OptimizationReport) -> list[str]:
    cache = report.cache
    return [] if cache is None else [f"cache {factor(cache.bytes_before / cache.bytes_after, 'smaller', 'larger')}"]


def _cache_facts(report: OptimizationReport) -> list[Fact]:
    cache = report.cache
    if cache is None:
        return []
    sizes = f"{human_bytes(cache.bytes_before)} -> {human_bytes(cache.bytes_after)} per token"
    return [
        ("cache", f"{sizes} ({factor(cache.bytes_before / cache.bytes_after, 'smaller', 'larger')})"),
        ("", f"{count(cache.attentions, 'attention layer')}: keys {cache.keys}, values {cache.values}"),
        *(
            (
                "decoded",
                f"{error.name}: relative error {number(error.relative_l2)}, cosine {error.cosine:.5f} "
                f"({cache.decoded_tokens} tokens, one per call, after a prompt of {cache.prompt_tokens})",
            )
            for error in cache.decode_error
        ),
    ]


def _similarity(report: OptimizationReport) -> str:
    errors = [error for one in (report, *report.parts.values()) for error in one.output_error]
    errors += [] if report.cache is None else report.cache.decode_error
    worst = min((error.cosine for error in errors if not math.isnan(error.cosine)), default=None)
    return "" if worst is None else f"cosine similarity {worst:.4f}"


def _accuracy_facts(report: OptimizationReport) -> list[Fact]:
    facts = [("accuracy", f"{error.name}: {error.describe()}") for error in report.output_error[:_OUTPUTS_SHOWN]]
    others = report.output_error[_OUTPUTS_SHOWN:]
    if others:
        worst = max(others, key=lambda error: error.relative_l2)
        facts.append(
            (
                "accuracy",
                f"{len(others)} more outputs: relative error at most {number(worst.relative_l2)} ({worst.name})",
            )
        )
    if report.feeds:
        facts.append(("measured on", report.feeds + (f": {report.judged_on}" if report.judged_on else "")))
    return facts


def _rounding_facts(report: OptimizationReport) -> list[Fact]:
    facts = []
    for label, errors, meaning in (
        ("rounding", report.rounding_error, "kernel rounding contributes a relative error of"),
        ("portable", report.portable_error, "without Ortolan's library, outputs differ by a relative error of"),
    ):
        if errors:
            worst = max(errors, key=lambda error: error.relative_l2)
            facts.append((label, f"{meaning} at most {number(worst.relative_l2)} ({worst.name})"))
    return facts


# ---- layers ----------------------------------------------------------------------------------------------------------


def _facts(report: OptimizationReport, reasons: int | None = None) -> list[Fact]:
    """Return the facts of a summary. reasons: the largest number of reasons shown for each kind; None: all."""
    return [
        *_speed_facts(report),
        *_size_facts(report),
        *_cache_facts(report),
        *_accuracy_facts(report),
        ("recipe", str(report.recipe.get("name"))),
        *_layer_facts(report, reasons),
        *_lookup_facts(report, reasons or _REASONS_SHOWN),
        *_search_facts(report),
        *(("note", note) for note in report.notes),
    ]


def _layer_facts(report: OptimizationReport, reasons: int | None) -> list[Fact]:
    """Return the facts about layers, grouped by format."""
    if not report.layers:
        return [("layers", _products(report))] if report.recipe.get("pass") else []
    groups: dict[Fact, list[LayerReport]] = {}
    for layer in report.layers:
        if layer.k is not None and (layer.weights or layer.status != "kept"):
            status = "" if layer in report.replaced else f", {layer.status} but not replaced"
            groups.setdefault((layer.weights or "float", status), []).append(layer)
    facts = [("layers", _products(report))]
    facts += [(label, _group(report, layers) + status) for (label, status), layers in groups.items()]
    return facts + _reason_facts("skipped", ((one.reason, one.name) for one in report.layers), reasons)


def _group(report: OptimizationReport, layers: list[LayerReport]) -> str:
    sizes = Counter(f"{layer.k} x {layer.n}" for layer in layers).most_common()
    listed = ", ".join(f"{number} of {size}" for size, number in sizes[:_SIZES_SHOWN])
    more = sum(number for _, number in sizes[_SIZES_SHOWN:])
    text = count(len(layers), "layer") + (f" of {sizes[0][0]}" if len(sizes) == 1 else f": {listed}")
    text += f", {more} of other sizes" if more else ""
    zeros = [fraction for layer in layers if (fraction := _zeros(report, layer)) is not None]
    if zeros:
        text += f"; {percent(sum(zeros) / len(zeros))} zeros"
    densities = [layer.density for layer in layers if layer.density is not None]
    if densities:
        text += f"; uses {percent(sum(densities) / len(densities))} of the inputs (density)"
    error = largest(layer.output_error for layer in layers)
    return text if error is None else f"{text}; error at most {number(error)}"


def _reason_facts(label: str, given: Iterable[tuple[str | None, str]], limit: int | None) -> list[Fact]:
    """Return one fact per reason, at most `limit`.

    given: (reason, name) pairs; pairs whose reason is None are skipped.
    """
    found: dict[str, list[str]] = {}
    for reason, name in given:
        if reason:
            found.setdefault(reason, []).append(name)
    facts = [(label, f"{reason}: {first_of(names)}") for reason, names in found.items()]
    if limit is None or len(facts) <= limit:
        return facts
    return [*facts[:limit], (label, f"{count(len(facts) - limit, 'more reason')}, listed by to_json()")]


def _lookup_facts(report: OptimizationReport, reasons: int) -> list[Fact]:
    facts = []
    verb = "would replace" if report.dry_run else "replaced"
    chains = Counter(" ".join(one.operators) for one in report.lookups if one.status != "kept")
    if chains:
        listed = "; ".join(f"{times} x {operators}" for operators, times in chains.items())
        facts.append(("lookups", f"{verb} {chains.total()} chains of element-wise operators: {listed}"))
    return facts + _reason_facts("no lookup", ((one.reason, one.name) for one in report.lookups), reasons)


def _operator_facts(report: OptimizationReport) -> list[Fact]:
    operators = Counter(layer.new_op for layer in report.replaced if layer.new_op)
    fused = Counter(part for layer in report.layers for part in layer.fused)
    kinds = ("operators", operators), ("fused", fused)
    return [(label, ", ".join(f"{times} {name}" for name, times in found.items())) for label, found in kinds if found]


def _columns(report: OptimizationReport) -> dict[str, list[str]]:
    """Return the cells of the table by column. Columns of passes that did not run have empty cells."""
    layers = [layer for layer in report.layers if layer.k is not None]
    return {
        "layer": [layer.name for layer in layers],
        "op": [layer.op for layer in layers],
        "new op": [layer.new_op or "" for layer in layers],
        "format": [layer.weights for layer in layers],
        "k x n": [f"{layer.k} x {layer.n}" for layer in layers],
        "sparsity": [percent(_zeros(report, layer)) for layer in layers],
        "threshold": [number(layer.threshold) for layer in layers],
        "density": [percent(layer.density) for layer in layers],
        "before": [human_bytes(layer.bytes_before) for layer in layers],
        "after": [human_bytes(layer.bytes_after) for layer in layers],
        "error": [number(layer.output_error) for layer in layers],
        "status": [layer.status for layer in layers],
    }


# ---- the search ------------------------------------------------------------------------------------------------------


def _search_facts(report: OptimizationReport) -> list[Fact]:
    auto = report.auto
    if auto is None or (not report.layers and not report.recipe.get("pass")):  # the headline shows the outcome
        return []
    chosen = "".join(f"; chosen: {trial.found}" for trial in auto.trials if trial.chosen)
    return [("search", f"{count(len(auto.trials), 'model')} tried{chosen}; budget: {auto.budget}")]


def _search_details(report: OptimizationReport) -> list[Fact]:
    """Return the search's measurements.

    Each layer is timed alone. Layers with the same size and format share a timing.
    """
    auto = report.auto
    if auto is None:
        return []
    sizes = {layer.name: f"{layer.k} x {layer.n}" for layer in report.layers if layer.k is not None}
    shapes = " / ".join(f"{batch} x {tokens}" for batch, tokens in auto.shapes)
    kinds = Counter(
        f"of {sizes[one.name]}, {one.chosen or 'unchanged'}: {one.times()} ms ({shapes} tokens)"
        for one in auto.layers
        if one.name in sizes and one.before_ms
    )
    # The outcome states a speed, so leave it out if the report already shows the measured speed.
    outcome = [("search", auto.outcome)] if report.latency_after is None else []
    return [
        *outcome,
        *auto.trial_facts(),
        *(("layer times", f"{count(same, 'layer')} {kind}") for kind, same in kinds.items()),
    ]
