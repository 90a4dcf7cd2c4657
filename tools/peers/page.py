"""The page of a result: docs/peers.md, by the template page.md.jinja."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ortolan.errors import OrtolanError
from ortolan.text_encoder import BATCH_TOKENS

from .pictures import PICTURES
from .result import PeersResult, Row, works_of
from .verdict import RULES, SECTIONS, Verdict, verdicts

try:
    import jinja2
except ImportError:
    raise OrtolanError("the page needs jinja2; install it with: pip install jinja2") from None

_TEMPLATE = "page.md.jinja"
_DIGITS = {"cosine": 4, "Spearman": 4, "perplexity": 2, "error": 4}


def write(result: PeersResult, data: str | None = None, folder: str | None = None) -> str:
    """The page's text, Markdown. data, folder: where the result and the pictures lie, as seen from the page; None: they
    are not shown."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"figure": _figure}
    found = [one for one in verdicts(result) if one.ratio is not None]
    sections = [section for section in SECTIONS if any(row.section == section for row in result.rows)]
    page: str = environment.get_template(_TEMPLATE).render(
        result=result,
        batch_tokens=BATCH_TOKENS,
        data=data,
        folder=folder,
        kind=_kind_of_cpu(result.cpu),
        missed=[one for one in found if one.missed],
        reached=[one for one in found if not one.missed],
        alone=[one for one in verdicts(result) if one.ratio is None],
        kinds=_kinds(found),
        groups={section: _groups(result, section) for section in sections},
        pictures=list(PICTURES),
        calls=[f"{row.model}, {row.name}: {_versions(row)}; {row.call}" for row in result.rows],
        quality={section: RULES[section].quality for section in sections},
    )
    return page


def _kind_of_cpu(name: str) -> str:
    """The feature set behind the CPU's name, as cpu_name writes it."""
    found = re.search(r"\((\w+)\)$", name)
    return found[1] if found else ""


def _kinds(found: Sequence[Verdict]) -> list[str]:
    """What the template's reasons are told by: the section and the first word of the work of each that misses."""
    kinds = dict.fromkeys((one.section, re.split(r"[ ,]", one.work)[0]) for one in found if one.missed)
    return [f"{section}: {word}" for section, word in kinds]


def _groups(result: PeersResult, section: str) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Model -> columns and rows of its table."""
    return {model: _table(rows) for (one, model), rows in result.groups().items() if one == section}


def _table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    qualities = list(dict.fromkeys(name for row in rows for name in row.quality))
    works = works_of(rows)
    several = len({threads for _, threads in works}) > 1
    columns = ["", "MB", "load, s", "peak, MB", *qualities]
    columns += [f"{work}{f' ({threads})' if several else ''}" for work, threads in works]
    lines = []
    for row in rows:
        cells = [f"**{row.name}**" if row.ours else row.name, _figure(row.megabytes)]
        cells += ["-" if one is None else _figure(one) for one in (row.load_seconds, row.peak_megabytes)]
        cells += [f"{row.quality[name]:.{_DIGITS[name]}f}" if name in row.quality else "-" for name in qualities]
        for work, threads in works:
            speed = row.speed(work, threads)
            cells.append("-" if speed is None else f"{_figure(speed.best)} ({_figure(speed.median)})")
        lines.append(cells)
    return columns, lines


def _versions(row: Row) -> str:
    return ", ".join(f"{name} {number}" for name, number in row.versions.items())


def _figure(value: float) -> str:
    """Three digits, without an exponent."""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text
