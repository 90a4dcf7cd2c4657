"""Timings, and sizes in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Minimum and median of several runs, in milliseconds."""

    min_ms: float
    median_ms: float

    def __str__(self) -> str:
        return f"{self.min_ms:.4g} / {self.median_ms:.4g}"

    def scaled(self, factor: float) -> Timing:
        """Return both times multiplied by a factor."""
        return Timing(self.min_ms * factor, self.median_ms * factor)


def human_bytes(count: int | None) -> str:
    """Return a size in words: 1536 is '1.5 KiB'; None is ''."""
    if count is None:
        return ""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
