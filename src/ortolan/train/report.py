"""The report of a training: the learning curve, and the sparsity of each layer."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class CurvePoint:
    """A point of the learning curve.

    Attributes:
        sparsity: The fraction of zeros in pruned weights.
        tokens: The number of trained tokens.
        loss: The mean loss since the previous point.
        score: The result of `evaluate`; None without it.
    """

    step: int
    sparsity: float
    tokens: int
    seconds: float
    loss: float
    score: float | None

    def __str__(self) -> str:
        score = "" if self.score is None else f", score {self.score:.4f}"
        return (
            f"step {self.step}: sparsity {self.sparsity:.1%}, {self.tokens} tokens, {self.seconds / 60:.1f} min, "
            f"loss {self.loss:.4f}{score}"
        )


@dataclass
class DistillReport:
    """The result of `distill`.

    Attributes:
        input: The original's path.
        original_score: The original's score; None without `evaluate`.
        sparsity: The fraction of zeros of each layer.
    """

    input: str
    output: str
    pattern: str
    steps: int
    tokens: int = 0
    seconds: float = 0.0
    original_score: float | None = None
    curve: list[CurvePoint] = field(default_factory=list)
    sparsity: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Any:
        """Return the table that rich prints."""
        from rich.table import Table

        mean = sum(self.sparsity.values()) / len(self.sparsity)
        units = "weights" if self.pattern == "unstructured" else f"{self.pattern} blocks"
        title = f"{self.output}: {len(self.sparsity)} layers, {mean:.1%} of {units} zero"
        table = Table(title=title, title_justify="left")
        for column in ("step", "sparsity", "tokens", "time", "loss", "score"):
            table.add_column(column, justify="right")
        if self.original_score is not None:
            table.add_row("original", "", "", "", "", f"{self.original_score:.4f}")
        for point in self.curve:
            table.add_row(*_columns(point))
        return table


def write_curve(path: Path, curve: list[CurvePoint]) -> None:
    """Write the learning curve as a CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(CurvePoint.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(map(asdict, curve))


def _columns(point: CurvePoint) -> list[str]:
    score = "" if point.score is None else f"{point.score:.4f}"
    minutes = f"{point.seconds / 60:.0f} min"
    return [str(point.step), f"{point.sparsity:.1%}", str(point.tokens), minutes, f"{point.loss:.4f}", score]
