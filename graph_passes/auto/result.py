"""What recipe "auto" measured and chose, for the report."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortolan.benchmarks.timing import Timing


@dataclass
class Form:
    """A layer in one of its forms."""

    milliseconds: list[float]  # by shape
    # ||XW - Y|| / ||XW|| for calibration inputs X and the operator's Y; None: not measured, as it is not fast enough
    error: float | None = None


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


@dataclass
class Trial:
    """A whole model that was made, and judged by the budget."""

    layers: int  # that were replaced
    attention: bool  # whether attention was fused
    within: bool
    found: str  # what the budget limits


@dataclass
class AutoReport:
    budget: str
    shapes: list[tuple[int, int]]  # (batch, tokens)
    outcome: str = ""
    layers: list[LayerChoice] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)  # in the order in which they were made
    changed: bool = False  # whether something is faster; else the model is the original
    attention: bool = False  # whether it is fused in the chosen model
    before: list[Timing] = field(default_factory=list)  # of the whole model, by shape
    after: list[Timing] = field(default_factory=list)
    measured: int = 0  # kinds of layers that were timed; the others' times were known

    def lines(self) -> list[str]:
        """For people."""
        found = [f"auto          {self.outcome}"]
        for (batch, tokens), before, after in zip(self.shapes, self.before, self.after, strict=False):
            found.append(
                f"auto          {batch} x {tokens} tokens: min {before.min_ms:.3g} -> {after.min_ms:.3g} ms, median "
                f"{before.median_ms:.3g} -> {after.median_ms:.3g} ms ({before.min_ms / after.min_ms:.2f}x)"
            )
        forms: dict[str, int] = {}
        for layer in self.layers:
            name = layer.chosen or "as they are"
            forms[name] = forms.get(name, 0) + 1
        counts = ", ".join(f"{count} {name}" for name, count in forms.items())
        attention = "; attention fused" if self.attention else ""
        found.append(f"auto          layers: {counts or 'none'}{attention}; {len(self.trials)} whole models tried")
        return found
