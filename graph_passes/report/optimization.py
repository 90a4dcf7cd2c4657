"""What was done to a model and what it gained: as objects, as JSON, and as a table for people."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .figures import Timing, human_bytes
from .page import save_page

if TYPE_CHECKING:
    import onnx
    from rich.console import Group

    from .search import AutoReport

_REASONS_SHOWN = 5  # why there is no lookup
_TEXT_WIDTH = 120  # of reports as text; names of layers are folded
_TOLD_ONCE = ("op", "weights", "sparsity", "status")  # columns that are told in a line where all rows say the same
_OUTPUTS_SHOWN = 3  # in the table; a decoder has two for each layer

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
            f"relative error {_number(self.relative_l2)}, cosine {self.cosine:.5f}, largest difference "
            f"{_number(self.max_abs)}"
        )
        if self.from_float is None:
            return text
        before, after = map(_number, self.from_float)
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
    """The result of optimize_onnx. `print` it, or take `to_json()`."""

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
    latency_cpus: int | None = None  # that this process may use
    latency_threads: int | None = None  # of each of the two sessions
    latency_padding: tuple[int, int] | None = None  # tokens of padding in the timed feed, and all of its tokens
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
        """Writes one page with tables and plots of all of this, which needs no other file (extra ortolan[html]).

        Raises OrtolanError.
        """
        save_page(self.to_dict(), path)

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        if self.parts:
            sizes = OptimizationReport({}, output=self.output, file_size_before=self.file_size_before)
            sizes.file_size_after = self.file_size_after
            parts = [part for name, report in self.parts.items() for part in (Text(name), report, Text(""))]
            return Group(*parts, Text("\n".join(sizes._summary())))
        title = Text(f"recipe {self.recipe.get('name')}: {self._headline()}")
        columns = self._columns()
        rows = len(columns["layer"])
        alike = {name: columns[name][0] for name in _TOLD_ONCE if rows > 1 and len(set(columns[name])) == 1}
        shown = {name: cells for name, cells in columns.items() if name not in alike and any(cells)}
        table = Table()
        for name in shown:
            justify: Literal["left", "right"] = "left" if name in ("layer", "op", "weights", "status") else "right"
            table.add_column(name, justify=justify, overflow="fold" if name == "layer" else "ellipsis")
        for cells in zip(*shown.values(), strict=True):
            table.add_row(*map(Text, cells))
        told = ", ".join(f"{name} {cell}" for name, cell in alike.items() if cell)
        lines = ([f"all layers    {told}"] if told else []) + self._reasons() + self._summary()
        return Group(title, *([table] if rows else []), Text("\n".join(lines)))

    def _columns(self) -> dict[str, list[str]]:
        """The cells of the table, by column; those of what was not done are empty."""
        layers = [layer for layer in self.layers if layer.k is not None]
        return {
            "layer": [layer.name for layer in layers],
            "op": [layer.op for layer in layers],
            "weights": [layer.weights for layer in layers],
            "k x n": [f"{layer.k} x {layer.n}" for layer in layers],
            "sparsity": [_percent(layer.sparsity) for layer in layers],
            "threshold": [_number(layer.threshold) for layer in layers],
            "density": [_percent(layer.density) for layer in layers],
            "before": [human_bytes(layer.bytes_before) for layer in layers],
            "after": [human_bytes(layer.bytes_after) for layer in layers],
            "error": [_number(layer.output_error) for layer in layers],
            "status": [layer.status for layer in layers],
        }

    def _reasons(self) -> list[str]:
        """Why layers were not replaced."""
        kept: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.reason:
                kept.setdefault(layer.reason, []).append(layer.name)
        return [
            f"not replaced  {reason}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for reason, names in kept.items()
        ]

    def _headline(self) -> str:
        if not self.layers and not self.recipe.get("pass"):
            return "the model stays as it is"
        verb = "would replace" if self.dry_run else "replaced"
        layers = f"{verb} {len(self.replaced)} of {len(self.layers)} matrix products"
        if not self.layers:
            layers = f"{verb} no matrix products"
        attention = sum(layer.k is None for layer in self.replaced)
        if attention:  # they have no weight, and no row in the table
            layers += f", {attention} of them in attention"
        if self.cache is None:
            return layers
        before, after = self.cache.bytes_before, self.cache.bytes_after
        change = f"cache {human_bytes(before)} -> {human_bytes(after)} a token"
        return f"{change} ({_factor(before / after, 'smaller', 'larger')}), {layers}"

    def _summary(self) -> list[str]:
        lines = self._lookup_lines()
        if self.auto is not None:
            lines += self.auto.lines() + self._time_lines(self.auto)
        if self.output:
            lines.append(f"written to    {self.output}")
        fused = Counter(part for layer in self.layers for part in layer.fused)
        if fused:
            lines.append(f"fused         {', '.join(f'{count} {part}' for part, count in fused.items())}")
        if self.file_size_before and self.file_size_after:
            ratio = self.file_size_before / self.file_size_after
            lines.append(
                f"size          {human_bytes(self.file_size_before)} -> {human_bytes(self.file_size_after)}"
                f" ({_factor(ratio, 'smaller', 'larger')})"
            )
        if self.latency_before and self.latency_after:
            before, after = self.latency_before, self.latency_after
            what = "one token, " if self.cache is not None and self.cache.decoded_tokens is not None else ""
            lines.append(
                f"latency       {what}min {before.min_ms:.3g} -> {after.min_ms:.3g} ms, median "
                f"{before.median_ms:.3g} -> {after.median_ms:.3g} ms "
                f"({self._speed()}{self.latency_threads} thread{'' if self.latency_threads == 1 else 's'} each)"
            )
        if self.cache is not None:
            lines += self._cache_lines(self.cache)
        for error in self.output_error[:_OUTPUTS_SHOWN]:
            lines.append(f"output        {error.name}: {error.describe()}")
        others = self.output_error[_OUTPUTS_SHOWN:]
        if others:
            largest = max(others, key=lambda error: error.relative_l2)
            lines.append(
                f"output        {len(others)} more: relative error up to {_number(largest.relative_l2)} "
                f"({largest.name})"
            )
        for label, errors, meaning in (
            ("rounding", self.rounding_error, "of this, rounding in the operators alone costs"),
            ("portable", self.portable_error, "without the library the answers differ by"),
        ):
            if errors:
                largest = max(errors, key=lambda error: error.relative_l2)
                lines.append(f"{label:14}{meaning} at most {_number(largest.relative_l2)} ({largest.name})")
        if self.feeds:
            lines.append(f"measured on   {self.feeds}" + (f": {self.judged_on}" if self.judged_on else ""))
        lines += [f"note          {note}" for note in self.notes]
        return lines

    def _speed(self) -> str:
        """How many times as fast, unless a search says it; and the padding that speed may come from."""
        if self.latency_before is None or self.latency_after is None:
            return ""
        ratio = self.latency_before.min_ms / self.latency_after.min_ms
        # One speedup a report: the search's is of all its shapes.
        told = self.auto is not None and self.auto.changed and self.auto.saves == "time"
        parts = [] if told else [f"{_factor(ratio, 'faster', 'slower')} by the minimum"]
        padding, tokens = self.latency_padding or (0, 0)
        if padding:
            parts.append(f"{padding} of {tokens} tokens are padding")
        return "".join(f"{part}, " for part in parts)

    def _time_lines(self, auto: AutoReport) -> list[str]:
        """Of layers, each timed alone; those of one size and form have the same times."""
        sizes = {layer.name: f"{layer.k} x {layer.n}" for layer in self.layers if layer.k is not None}
        shapes = " / ".join(f"{batch} x {tokens}" for batch, tokens in auto.shapes)
        kinds = Counter(
            f"of {sizes[one.name]}, {one.chosen or 'as it is'}: {one.times()} ms ({shapes} tokens)"
            for one in auto.layers
            if one.name in sizes and one.before_ms
        )
        return [f"layer times   {count} {kind}" for kind, count in kinds.items()]

    def _cache_lines(self, cache: CacheReport) -> list[str]:
        lines = [f"cache         {cache.attentions} attentions: keys {cache.keys}, values {cache.values}"]
        for error in cache.decode_error:
            lines.append(
                f"decoded       {error.name}: relative error {_number(error.relative_l2)}, cosine {error.cosine:.5f} "
                f"({cache.decoded_tokens} tokens, one a call, after a call of {cache.prompt_tokens})"
            )
        return lines

    def _lookup_lines(self) -> list[str]:
        lines = []
        verb = "would replace" if self.dry_run else "replaced"
        chains = Counter(" ".join(one.operators) for one in self.lookups if one.status != "kept")
        if chains:
            listed = "; ".join(f"{count} x {operators}" for operators, count in chains.items())
            lines.append(f"lookups       {verb} {chains.total()} chains of element-wise operators: {listed}")
        kept: dict[str, list[str]] = {}
        for one in self.lookups:
            if one.reason:
                kept.setdefault(one.reason, []).append(one.name)
        shown = list(kept.items())[:_REASONS_SHOWN]
        for reason, names in shown:
            lines.append(f"no lookup     {reason}: {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else ""))
        if len(kept) > len(shown):
            lines.append(f"no lookup     {len(kept) - len(shown)} more reasons; to_json() has all of them")
        return lines


def as_text(result: Any) -> str:
    """What rich prints of it, without colours."""
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=_TEXT_WIDTH, no_color=True, highlight=False, legacy_windows=False).print(result)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _factor(ratio: float, better: str, worse: str) -> str:
    if f"{ratio:.2f}" == "1.00":
        return "about the same"
    return f"{ratio:.2f}x {better}" if ratio >= 1 else f"{1 / ratio:.2f}x {worse}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:.2g}"


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
