"""The report as one self-contained HTML page: tables (page.html.jinja) and plots (SVG by matplotlib).

The page has the content of `OptimizationReport.to_dict()`. Names come from an untrusted model file: the template
escapes all of them, and plots show none.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ortolan.errors import OrtolanError

from ..files.output import write_text
from .figures import human_bytes

_TEMPLATE = "page.html.jinja"
_NEEDS = ("jinja2", "matplotlib")


def require_packages() -> None:
    """Check that jinja2 and matplotlib are installed, before a long run starts.

    Raises:
        OrtolanError: A package is missing.
    """
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise OrtolanError(
            f"an HTML report needs {' and '.join(missing)}, which is not installed: pip install {' '.join(missing)}"
        )


def save_page(facts: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the page to a file, or replace it. facts: the result of `OptimizationReport.to_dict`.

    Raises:
        OrtolanError: A package is missing.
        OutputError: The file cannot be written.
    """
    write_text(path, make_page(facts))


def make_page(facts: Mapping[str, Any]) -> str:
    """Return the page's HTML.

    Raises:
        OrtolanError: A package is missing.
    """
    require_packages()
    jinja2 = import_module("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": human_bytes, "percent": _percent, "number": _number, "times": _times}
    auto = facts["auto"] or {}
    page: str = environment.get_template(_TEMPLATE).render(
        **facts,
        rows=_rows(facts),
        shapes=[f"{batch} x {tokens}" for batch, tokens in auto.get("shapes", ())],
        plots=_plots(facts),
        json=json.dumps(facts, indent=2, allow_nan=False),
    )
    return page


def _rows(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per layer, with the search's measurements of the layer."""
    chosen = {layer["name"]: layer for layer in (facts["auto"] or {}).get("layers", ())}
    rows = []
    for layer in facts["layers"]:
        found = chosen.get(layer["name"], {})
        reasons = [found.get("reason"), layer["reason"] if layer["status"] == "kept" or not found else None]
        rows.append(
            layer
            | {
                "form": found.get("chosen") or "",
                "before_ms": found.get("before_ms", []),
                "after_ms": found.get("after_ms", []),
                "forms": found.get("forms", {}),
                "reasons": list(dict.fromkeys(reason for reason in reasons if reason)),
            }
        )
    return rows


# ---- plots -----------------------------------------------------------------------------------------------------------


def _plots(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (title, data URL) of each plot that has data."""
    figures: list[tuple[str, Callable[[Any], bool]]] = [
        ("Error against time and size: the search's path, the models it tried, and the chosen one",
         lambda figure: _draw_trade_off(figure, facts["auto"])),
        ("Model: original and optimized", lambda figure: _draw_whole(figure, facts)),
        ("Layers in graph order: output error and size of the weights",
         lambda figure: _draw_layers(figure, facts["layers"])),
    ]  # fmt: skip
    found = []
    for title, draw in figures:
        # Do not use pyplot, because it looks for a display.
        figure = import_module("matplotlib.figure").Figure(figsize=(11, 3.6), layout="constrained")
        if draw(figure):
            svg = io.BytesIO()
            with import_module("matplotlib").rc_context({"svg.hashsalt": "ortolan"}):
                figure.savefig(svg, format="svg", metadata={"Date": None})
            # Plots are embedded as images, in which scripts cannot run and ids cannot collide.
            found.append((title, f"data:image/svg+xml;base64,{base64.b64encode(svg.getvalue()).decode()}"))
    return found


def _draw_trade_off(figure: Any, auto: Mapping[str, Any] | None) -> bool:
    if not auto or not auto["path"]:
        return False
    left, right = figure.subplots(1, 2)
    points = [{"time": 1.0, "error": 0.0}, *auto["path"]]
    left.plot([p["time"] for p in points], [p["error"] for p in points], color="0.6", marker=".", label="path")
    label = {"time": "time of the layers, original = 1", "bytes": "bytes of the layers, all in 8 bits = 1"}
    left.set(xlabel=label[auto["saves"]], ylabel="estimated output error")
    right.set(xlabel="file size, MB", ylabel="1 - cosine similarity of the worst output")
    for kind, color, marker, size in (
        ("over the budget", "tab:red", "x", 40),
        ("within the budget", "tab:green", "o", 40),
        ("chosen", "tab:blue", "*", 180),
    ):
        trials = [trial for trial in auto["trials"] if _verdict(trial) == kind]
        style = {"color": color, "marker": marker, "s": size, "label": kind, "zorder": 3}
        left.scatter([t["time"] for t in trials], [t["error"] for t in trials], **style)
        whole = [t for t in trials if t["bytes"] is not None and t["cosine"] is not None]
        right.scatter([t["bytes"] / 1e6 for t in whole], [1 - t["cosine"] for t in whole], **style)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return True


def _verdict(trial: Mapping[str, Any]) -> str:
    return "chosen" if trial["chosen"] else "within the budget" if trial["within"] else "over the budget"


def _draw_whole(figure: Any, facts: Mapping[str, Any]) -> bool:
    auto = facts["auto"]
    times: list[tuple[str, float, float]] = []
    if auto and auto["before"]:
        shapes = [f"{batch} x {tokens}" for batch, tokens in auto["shapes"]]
        pairs = zip(shapes, auto["before"], auto["after"], strict=False)
        times = [(shape, old["min_ms"], new["min_ms"]) for shape, old, new in pairs]
    elif facts["latency_before"] and facts["latency_after"]:
        times = [("one run", facts["latency_before"]["min_ms"], facts["latency_after"]["min_ms"])]
    size = facts["file_size_before"], facts["file_size_after"]
    panels = [([name], [old], [new], "ms, fastest run") for name, old, new in times]
    if all(size):
        panels.append((["file"], [size[0] / 1e6], [size[1] / 1e6], "MB"))
    if not panels:
        return False
    for axes, (names, old, new, unit) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        bars = axes.bar(["original", "optimized"], old + new, color=["0.6", "tab:blue"])
        axes.bar_label(bars, fmt="%.3g")
        axes.set(title=names[0], ylabel=unit)
    return True


def _draw_layers(figure: Any, layers: Sequence[Mapping[str, Any]]) -> bool:
    shown = [layer for layer in layers if layer["k"] is not None]
    if not shown:
        return False
    left, right = figure.subplots(1, 2)
    errors = [(index, layer["output_error"]) for index, layer in enumerate(shown) if layer["output_error"]]
    if errors:
        left.scatter(*zip(*errors, strict=True), s=14, color="tab:blue")
        left.set_yscale("log")
    left.set(xlabel="layer", ylabel="output error, ||XW - Y|| / ||XW||")
    positions = range(len(shown))
    before = [(layer["bytes_before"] or 0) / 1e6 for layer in shown]
    after = [(layer["bytes_before"] if layer["bytes_after"] is None else layer["bytes_after"]) or 0 for layer in shown]
    right.bar(positions, before, color="0.8", width=1.0, label="original")
    right.bar(positions, [one / 1e6 for one in after], color="tab:blue", width=0.6, label="optimized")
    right.set(xlabel="layer", ylabel="MB")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return True


# ---- filters ---------------------------------------------------------------------------------------------------------


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def _number(number: float | None, digits: int = 3) -> str:
    return "" if number is None else f"{number:.{digits}g}"


def _times(milliseconds: Sequence[float]) -> str:
    """Return the times of all shapes as the text of one cell."""
    return " / ".join(f"{one:.3g}" for one in milliseconds)
