"""Write docs/results.md, the pages of all results, and their pictures.

python -m tools.peers.site docs

Every DOCS/measurements/data/peers-KIND-DATE.json becomes DOCS/measurements/peers-KIND-DATE.md with pictures in
DOCS/pictures/KIND/. DOCS/results.md shows the newest result of each kind of CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from ortolan.errors import OrtolanError

from . import page, pictures
from .freshness import marked
from .names import MODELS, cpu_kind, cpu_label, form_label, work_label
from .result import PeersResult
from .verdict import DECODERS, ENCODERS, SERVING, SIZES, SPARSE_ENCODERS, Verdict, verdicts

# Kinds of CPU in the order of the tabs.
KINDS = ("AMX", "AVX-512", "AVX2")
# The rows of a tab as (section, model, works).
_ROWS = (
    (ENCODERS, "all-minilm-l6-v2", ("1x16", "1x128", "8x64", "mixed 8-256", "mixed 8-256, sorted", "STS-B")),
    (SPARSE_ENCODERS, "all-minilm-l6-v2, 80 %", ("1x128", "mixed 8-256")),
    (DECODERS, "smollm2-135m-instruct", ("prompt 128", "prompt 1024", "decode", "step at 4096", "step at 16384")),
    (SERVING, "smollm2-135m-instruct", ("16 requests, prompts", "16 requests, whole")),
    (SIZES, "qwen2.5-1.5b", ("prompt 128", "decode", "16 requests")),
)


def data_files(docs: Path) -> list[Path]:
    """Return the files of all results, sorted by kind of CPU, then by date."""
    return sorted((docs / "measurements" / "data").glob("peers-*.json"))


def read(path: Path) -> PeersResult:
    """Return the result in a file."""
    return PeersResult.from_json(path.read_text(encoding="utf-8"))


def pages(docs: Path) -> dict[Path, str]:
    """Return the text of every page by its path.

    Raises:
        OrtolanError: A file is not a result.
    """
    found = {}
    for path in data_files(docs):
        written = docs / "measurements" / f"{path.stem}.md"
        found[written] = page.write(read(path), f"data/{path.name}", f"../pictures/{_folder(path)}")
    found[docs / "results.md"] = results_page(docs)
    return found


def results_page(docs: Path) -> str:
    """Return the page "Results" with a tab for each kind of CPU."""
    newest = {cpu_kind(read(path).cpu): path for path in data_files(docs)}
    tabs = [_tab(kind, newest[kind]) for kind in KINDS if kind in newest]
    return page.render("results.md.jinja", {"tabs": tabs, "picture_texts": page.PICTURE_TEXTS})


def _tab(kind: str, path: Path) -> dict[str, object]:
    result = marked(read(path))
    found = {(one.section, one.model, one.work): one for one in verdicts(result) if one.threads == pictures.THREADS}
    rows = [
        (_label(section, model, work), one)
        for section, model, works in _ROWS
        for work in works
        if (one := found.get((section, model, work))) and one.ratio is not None
    ]
    return {
        "kind": kind,
        "cpu": cpu_label(result.cpu),
        "date": result.date,
        "page": f"measurements/{path.stem}.md",
        "pictures": f"pictures/{_folder(path)}",
        "rows": [_cells(label, one) for label, one in rows],
    }


def _label(section: str, model: str, work: str) -> str:
    if section == SPARSE_ENCODERS:
        return f"{model.partition(', ')[2]} zeros: {work_label(work)}"
    return f"{MODELS[model]}: {work_label(work)}" if section == SIZES else work_label(work)


def _cells(label: str, one: Verdict) -> dict[str, str]:
    assert one.peer is not None and one.peer_value is not None
    return {
        "label": label,
        "ours": f"{page.figure(one.our_value)}, {page.form_of(one.ours)}",
        "peer": page.figure(one.peer_value),
        "name": form_label(one.peer),
        "ratio": f"{one.ratio:.2f}",
        "by_medians": page.by_medians(one),
    }


def _folder(path: Path) -> str:
    """Return the folder of a result's pictures: "amx" for peers-amx-2026-11-25.json."""
    return path.stem.split("-")[1]


def write_all(docs: Path) -> None:
    """Write the pages and pictures of every result below `docs`."""
    for path, text in pages(docs).items():
        path.write_text(text, encoding="utf-8")
    newest: Mapping[str, Path] = {_folder(path): path for path in data_files(docs)}
    for folder, path in newest.items():
        (docs / "pictures" / folder).mkdir(parents=True, exist_ok=True)
        pictures.draw_all(read(path), docs / "pictures" / folder)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.peers.site", description=__doc__.splitlines()[0])
    parser.add_argument("docs", type=Path, help="a folder with measurements/data/peers-KIND-DATE.json")
    docs = parser.parse_args().docs
    if not (docs / "measurements" / "data").is_dir():
        parser.error(f"{docs} has no folder measurements/data")
    try:
        write_all(docs)
    except OrtolanError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
