"""What came of a training: the curve of quality against steps, and how sparse each layer is."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class CurvePoint:
    """After so many steps. loss: the mean since the point before; score: None where no evaluation was asked for."""

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
    """sparsity: by layer, the share of its blocks that are zero."""

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
        return json.dumps(asdict(self), indent=2)

    def __rich__(self) -> Any:
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
    """As a CSV file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(CurvePoint.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(map(asdict, curve))


def _columns(point: CurvePoint) -> list[str]:
    score = "" if point.score is None else f"{point.score:.4f}"
    minutes = f"{point.seconds / 60:.0f} min"
    return [str(point.step), f"{point.sparsity:.1%}", str(point.tokens), minutes, f"{point.loss:.4f}", score]
