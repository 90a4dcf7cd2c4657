"""What the search measured and chose, for the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from .figures import Timing
from .lines import Fact, count, first_of

Saves = Literal["time", "bytes"]  # what a search saves


@dataclass
class Form:
    """A layer in one of its forms."""

    milliseconds: list[float]  # by shape
    # ||XW - Y|| / ||XW|| for calibration inputs X and the operator's Y; None: not measured, as it is not fast enough
    error: float | None = None
    bytes: int | None = None  # of the packed weight, where bytes are what is saved


@dataclass
class LayerChoice:
    """What a layer became, and what else it could have become."""

    name: str
    reason: str
    chosen: str | None = None  # name of a candidate; None: it stays as it is
    error: float | None = None
    before_ms: list[float] = field(default_factory=list)  # by shape, timed alone
    after_ms: list[float] = field(default_factory=list)
    forms: dict[str, Form] = field(default_factory=dict)
    sensitivity: float | None = None  # the error that it makes in the outputs, divided by that of the layer

    def times(self) -> str:
        """Milliseconds by shape, before and after, for people."""
        return " -> ".join(" / ".join(f"{ms:.3g}" for ms in one) for one in (self.before_ms, self.after_ms) if one)


@dataclass
class Trial:
    """A whole model that was made, and judged by the budget."""

    layers: int  # that were replaced
    attention: bool  # whether attention was fused
    within: bool
    found: str  # what the budget limits
    # Of the layers alone, by the times of their forms, the original's being 1; or the bytes, those of 8 bits being 1.
    # None: layers were not measured.
    time: float | None = 1.0
    error: float | None = 0.0  # of the outputs, as layers' errors and sensitivities have it, added up in squares
    cosine: float | None = None  # of the worst output against the original's
    bytes: int | None = None  # of the file
    chosen: bool = False
    saves: Saves = "time"

    def __str__(self) -> str:
        size = "" if self.bytes is None else f", {self.bytes / 1e6:.1f} MB"
        attention = ", attention fused" if self.attention else ""
        verdict = "chosen" if self.chosen else "within the budget" if self.within else "over the budget"
        estimated = ""
        if self.time is not None and self.error is not None:
            estimated = f"; {self.saves} of the layers {self.time:.2f}, estimated error {self.error:.2g}"
        return f"{count(self.layers, 'layer')}{attention}: {self.found}{estimated}{size}: {verdict}"


@dataclass
class PathPoint:
    """A step of the search's path: what this layer becomes, with all steps before it."""

    layer: str
    form: str
    time: float  # as in Trial
    error: float


@dataclass
class AutoReport:
    budget: str
    shapes: list[tuple[int, int]]  # (batch, tokens)
    outcome: str = ""
    layers: list[LayerChoice] = field(default_factory=list)
    path: list[PathPoint] = field(default_factory=list)  # of models: estimated, from the times and errors of layers
    trials: list[Trial] = field(default_factory=list)  # in the order in which they were made
    changed: bool = False  # whether something is faster; else the model is the original
    attention: bool = False  # whether it is fused in the chosen model
    before: list[Timing] = field(default_factory=list)  # of the whole model, by shape
    after: list[Timing] = field(default_factory=list)
    measured: int = 0  # kinds of layers that were timed; the others' times were known
    saves: Saves = "time"
    gain: float | None = None  # how many times as fast the chosen model is, in the mean over the shapes

    def facts(self) -> list[Fact]:
        """Return the outcome, the speed, and the number of layers in each form."""
        forms = Counter(layer.chosen or "as they are" for layer in self.layers)
        counts = ", ".join(f"{times} {name}" for name, times in forms.items())
        attention = "; attention fused" if self.attention else ""
        layers = f"{counts or 'none'}{attention}; {count(len(self.trials), 'whole model')} tried"
        return [("search", self.outcome), *self.speed_facts(), ("layers", layers)]

    def speed_facts(self) -> list[Fact]:
        """Return the times of the whole model by shape."""
        return [
            (
                "speed",
                f"{batch} x {tokens} tokens: min {before.min_ms:.3g} -> {after.min_ms:.3g} ms, median "
                f"{before.median_ms:.3g} -> {after.median_ms:.3g} ms ({before.min_ms / after.min_ms:.2f}x)",
            )
            for (batch, tokens), before, after in zip(self.shapes, self.before, self.after, strict=False)
        ]

    def trial_facts(self) -> list[Fact]:
        """Return the whole models that were tried, and the reasons for the layers' forms."""
        reasons: dict[str, list[str]] = {}
        for layer in self.layers:
            reasons.setdefault(layer.reason, []).append(layer.name)
        return [
            *(("tried", str(trial)) for trial in self.trials),
            *(("reason", f"{reason}: {first_of(names)}") for reason, names in reasons.items()),
        ]
