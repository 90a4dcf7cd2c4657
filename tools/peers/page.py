"""Write the page of a result, docs/measurements/peers-*.md, from the template page.md.jinja."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ortolan.errors import OrtolanError

from . import serving_table, sizes
from .freshness import MARK, is_stale, marked
from .names import MODELS, cpu_label, form_label
from .result import PeersResult, Row, works_of
from .verdict import SECTIONS, SERVING, SIZES, Verdict, verdicts

try:
    import jinja2
except ImportError:
    raise OrtolanError("the page needs jinja2; install it with: pip install jinja2") from None

# Maps a picture to its alternative text.
PICTURE_TEXTS: Mapping[str, str] = {
    "summary": "Embedding and decoding speed by runtime",
    "context": "Decoding speed by context length",
    "shapes": "Encoder speed by batch shape",
}
_Table = tuple[list[str], list[list[str]]]  # columns and lines
EXPLANATION = f" {MARK}: measured with an older version of Ortolan's kernels or engine."
_DIGITS = {"cosine": 4, "Spearman": 4, "nDCG@10": 4, "perplexity": 2, "error": 4}


def render(template: str, values: Mapping[str, object]) -> str:
    """Return the text of a template in this folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text: str = environment.get_template(template).render(values)
    return text


def write(result: PeersResult, data: str | None = None, folder: str | None = None) -> str:
    """Return the page as Markdown.

    data, folder: The result's file and the folder of pictures, relative to the page; None for no links or pictures.
    """
    stale = any(map(is_stale, result.rows))
    result = marked(result)
    found = [one for one in verdicts(result) if one.threads is not None]
    compared = sorted((one for one in found if one.ratio is not None), key=lambda one: (one.ratio or 0.0) >= 1.0)
    sections = [section for section in SECTIONS if any(row.section == section for row in result.rows)]
    several = len({one.threads for one in found}) > 1
    return render(
        "page.md.jinja",
        {
            "result": result,
            "cpu": cpu_label(result.cpu),
            "data": data,
            "several": several,
            "explanation": EXPLANATION if stale else "",
            "folder": folder,
            "pictures": PICTURE_TEXTS,
            "compared": [_compared_cells(one, several) for one in compared],
            "alone": [f"{_model(one.model)}, {one.work} ({one.ours.name})" for one in found if one.ratio is None],
            "groups": {section: _groups(result, section) for section in sections},
        },
    )


def figure(value: float) -> str:
    """Return a value with three digits and without an exponent."""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text


def _model(name: str) -> str:
    """Return a model's name as its authors write it; "all-minilm-l6-v2, 80 %" keeps the part after the comma."""
    first, comma, rest = name.partition(",")
    return MODELS.get(first, first) + comma + rest


def _compared_cells(one: Verdict, several: bool) -> list[str]:
    assert one.peer is not None and one.peer_value is not None and one.ratio is not None
    return [
        _model(one.model),
        f"{one.work} ({one.threads})" if several else one.work,
        form_of(one.ours),
        figure(one.our_value),
        form_label(one.peer),
        figure(one.peer_value),
        f"**{one.ratio:.2f}**",
        by_medians(one),
    ]


def by_medians(one: Verdict) -> str:
    """Return the ratio by median times, or "-"."""
    return "-" if one.by_medians is None else f"{one.by_medians:.2f}"


def form_of(row: Row) -> str:
    """Return the name of one of Ortolan's configurations without "Ortolan"."""
    return row.name.removeprefix("Ortolan").strip(", ") if row.ours else row.name


def _groups(result: PeersResult, section: str) -> dict[str, _Table]:
    """Return by model the columns and rows of its table."""
    tables: Mapping[str, Callable[[Sequence[Row]], _Table]] = {
        SERVING: lambda rows: (serving_table.columns(), serving_table.lines(rows)),
        SIZES: lambda rows: (sizes.columns(), sizes.lines(rows)),
    }
    table = tables.get(section, _table)
    return {
        _model(model) + _later(result, rows): table(rows)
        for (one, model), rows in result.groups().items()
        if one == section
    }


def _later(result: PeersResult, rows: Sequence[Row]) -> str:
    """Return the date of rows that were measured after the result was begun."""
    last = max((row.measured or result.date for row in rows), default=result.date)
    return f", {last}" if last > result.date else ""


def _table(rows: Sequence[Row]) -> _Table:
    qualities = list(dict.fromkeys(name for row in rows for name in row.quality))
    works = works_of(rows)
    several = len({threads for _, threads in works}) > 1
    has_load_time = any(row.load_seconds is not None for row in rows)
    columns = ["", "MB", *(["load, s"] if has_load_time else []), *qualities]
    columns += [f"{work}{f' ({threads})' if several else ''}" for work, threads in works]
    lines = []
    for row in rows:
        cells = [f"**{row.name}**" if row.ours else form_label(row), figure(row.megabytes)]
        if has_load_time:
            cells.append("-" if row.load_seconds is None else figure(row.load_seconds))
        cells += [f"{row.quality[name]:.{_DIGITS[name]}f}" if name in row.quality else "-" for name in qualities]
        speeds = [row.speed(work, threads) for work, threads in works]
        cells += ["-" if speed is None else figure(speed.best) for speed in speeds]
        lines.append(cells)
    return columns, lines
