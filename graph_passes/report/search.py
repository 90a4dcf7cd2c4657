"""The search's measurements and choices, for the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from .figures import Timing
from .lines import Fact, count, first_of

Saves = Literal["time", "bytes"]  # the resource that a search saves


@dataclass
class MeasuredForm:
    """Measurements of one layer in one target format (weight type, sparsity and operator)."""

    milliseconds: list[float]  # time for each input shape
    # ||XW - Y|| / ||XW|| for calibration inputs X and the operator's output Y; None: not measured, because the format
    # is too slow
    error: float | None = None
    bytes: int | None = None  # size of the packed weight, if the search saves bytes


@dataclass
class LayerChoice:
    """The format chosen for a layer, and the measured alternatives."""

    name: str
    reason: str
    chosen: str | None = None  # name of the chosen format; None: the layer is unchanged
    error: float | None = None
    before_ms: list[float] = field(default_factory=list)  # time of the layer alone, for each input shape
    after_ms: list[float] = field(default_factory=list)
    forms: dict[str, MeasuredForm] = field(default_factory=dict)
    sensitivity: float | None = None  # relative error of the model's outputs per relative error of the layer's output

    def times(self) -> str:
        """Return the times for each input shape, before and after, in words."""
        return " -> ".join(" / ".join(f"{ms:.3g}" for ms in one) for one in (self.before_ms, self.after_ms) if one)


@dataclass
class Trial:
    """A whole model that the search made and checked against the budget."""

    layers: int  # number of replaced layers
    attention: bool  # True if attention was fused
    within: bool
    found: str  # the measured value that the budget limits, in words
    # The sum of the layers' times relative to the original; or if bytes are saved, the sum of their bytes relative to 8
    # bits in all layers. None: not measured.
    time: float | None = 1.0
    # Estimated output error: root of the sum over layers of (error times sensitivity) squared.
    error: float | None = 0.0
    cosine: float | None = None  # smallest cosine similarity of an output to the original's
    bytes: int | None = None  # size of the model file
    chosen: bool = False
    saves: Saves = "time"

    def __str__(self) -> str:
        size = "" if self.bytes is None else f", {self.bytes / 1e6:.1f} MB"
        attention = ", attention fused" if self.attention else ""
        verdict = "chosen" if self.chosen else "within the budget" if self.within else "over the budget"
        estimated = ""
        if self.time is not None and self.error is not None:
            base = "original" if self.saves == "time" else "8-bit"
            estimated = f"; {self.saves} of the layers {self.time:.2f}x {base}, estimated error {self.error:.2g}"
        return f"{count(self.layers, 'layer')}{attention}: {self.found}{estimated}{size}; {verdict}"


@dataclass
class PathPoint:
    """One step of the search's path: this layer changes to this format, in addition to all earlier steps."""

    layer: str
    form: str
    time: float  # time and error as in Trial
    error: float


@dataclass
class AutoReport:
    """The search's budget, measurements, trials and outcome."""

    budget: str
    shapes: list[tuple[int, int]]  # (batch, tokens)
    outcome: str = ""
    layers: list[LayerChoice] = field(default_factory=list)
    path: list[PathPoint] = field(default_factory=list)  # each step's time and error are estimated from single layers
    trials: list[Trial] = field(default_factory=list)  # models in the order in which they were tried
    changed: bool = False  # False: no format was faster, so the model is the original
    attention: bool = False  # True if attention is fused in the chosen model
    before: list[Timing] = field(default_factory=list)  # times of the whole model, by shape
    after: list[Timing] = field(default_factory=list)
    measured: int = 0  # number of distinct layers that were timed in this run; all other times were cached
    saves: Saves = "time"
    gain: float | None = None  # speedup of the chosen model, averaged over the shapes

    def facts(self) -> list[Fact]:
        """Return the outcome, the speed, and the number of layers in each format."""
        forms = Counter(layer.chosen or "unchanged" for layer in self.layers)
        counts = ", ".join(f"{times} {name}" for name, times in forms.items())
        attention = "; attention fused" if self.attention else ""
        layers = f"{counts or 'none'}{attention}; {count(len(self.trials), 'model')} tried"
        return [("search", self.outcome), *self.speed_facts(), ("layers", layers)]

    def speed_facts(self) -> list[Fact]:
        """Return the times of the whole model by shape."""
        return [
            (
                "speed",
                f"{batch} x {tokens} tokens: fastest run {before.min_ms:.3g} -> {after.min_ms:.3g} ms, median "
                f"{before.median_ms:.3g} -> {after.median_ms:.3g} ms ({before.min_ms / after.min_ms:.2f}x)",
            )
            for (batch, tokens), before, after in zip(self.shapes, self.before, self.after, strict=False)
        ]

    def trial_facts(self) -> list[Fact]:
        """Return the models that were tried, and the reasons for the formats of layers."""
        reasons: dict[str, list[str]] = {}
        for layer in self.layers:
            reasons.setdefault(layer.reason, []).append(layer.name)
        return [
            *(("tried", str(trial)) for trial in self.trials),
            *(("reason", f"{reason}: {first_of(names)}") for reason, names in reasons.items()),
        ]
