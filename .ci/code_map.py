"""Draw the map of the code for CONTRIBUTING.md: code_map.py [--check]

Reads the imports of the Python packages and the includes of the native folders, and writes
docs/pictures/code-map-light.svg and -dark.svg. An arrow points from a package to a package that
it imports; arrows that a path of other arrows implies are left out. With --check, writes nothing and exits with 1 if a
picture is not current. Fails if packages import each other in a circle.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"

# Names of boxes with their captions, and folders that have no box.
PYTHON = {
    "src/ortolan": "API, CLI, hosts",
    "server": "OpenAI's API, Ray",
    "engine": "many requests",
    "train": "distillation in torch",
    "models": "model builders",
    "benchmarks": "ortolan bench",
    "auto": "the search",
    "run": "runs a recipe",
    "recipe": "lists of passes",
    "forms": "arguments to recipe",
    "registry": "order of passes",
    "serve": "form for serving",
    "passes": "change the graph",
    "text": "tokenizers",
    "operators": "nodes, packing",
    "measure": "runs and times",
    "find": "match patterns",
    "weights": "round, prune",
    "files": "read, write",
    "report": "what was done",
    "names": "constants",
    "options": "checks",
}
NATIVE = {
    "src": "Python bindings",
    "provider": "execution provider",
    "operators": "one folder each",
    "opencl": "int4 on GPUs",
    "match": "pattern rules",
    "matmul": "linear layers",
    "attention": "attention, caches",
    "epilogue": "activation, norm",
    "formats": "packed weights",
    "simd": "vectors per target",
    "isa": "CPU features",
    "ort": "ONNX Runtime API",
    "host": "threads, errors",
}
_COLOURS = {
    "light": {"text": "#1f2328", "quiet": "#59636e", "line": "#9aa4af", "box": "#f3f5f8", "edge": "#c4ccd4"},
    "dark": {"text": "#e6edf3", "quiet": "#9198a1", "line": "#6b7480", "box": "#1c232c", "edge": "#414a54"},
}
_BOX, _GAP, _LEVEL, _BEND = (126, 34), 10, 62, 12

Edges = dict[str, set[str]]


@dataclass
class Panel:
    """Boxes with their centres, and arrows as lists of points."""

    boxes: dict[str, tuple[float, float]]
    arrows: list[list[tuple[float, float]]]
    width: float
    height: float


def python_edges() -> Edges:
    """Return the packages that each Python package imports.

    Imports of errors, progress and sessions of src/ortolan are left out, because all packages may use these.
    """
    roots = {"src/ortolan": "ortolan", "models": "ortolan.models", "benchmarks": "ortolan.benchmarks"}
    roots["graph_passes"] = "ortolan.graph_passes"
    found: Edges = {}
    for folder, package in roots.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
            source = _python_box(module)
            for target in _imports(path, module):
                box = _python_box(target)
                if source and box and box not in (source, "src/ortolan"):
                    found.setdefault(source, set()).add(box)
    return found


def _python_box(module: str) -> str | None:
    """Return the name of the box for a module."""
    parts = module.split(".")
    if parts[:2] == ["ortolan", "graph_passes"]:
        return parts[2] if len(parts) > 2 and parts[2] in PYTHON else None
    if parts[0] != "ortolan" or parts[1:2] == ["_native"]:
        return None
    own = ("train", "models", "benchmarks", "engine", "server")
    return parts[1] if len(parts) > 1 and parts[1] in own else "src/ortolan"


def _imports(path: Path, module: str) -> Iterator[str]:
    """Yield the absolute names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            if node.module and base != ["ortolan"]:
                yield ".".join(base)
            else:
                yield from (".".join((*base, name.name)) for name in node.names)


def native_edges() -> Edges:
    """Return the folders of ops/ that each folder includes headers of; all operators share one box."""
    table = (ROOT / "ops" / "operators.inc").read_text(encoding="utf-8")
    operators = set(re.findall(r"ORTOLAN_OPERATOR\(\w+, (\w+)\)", table))
    folders = {path.name for path in (ROOT / "ops").iterdir() if path.is_dir()}
    files = [*(ROOT / "ops").rglob("*"), *(ROOT / "src").glob("*"), *(ROOT / "src" / "testing").glob("*")]
    found: Edges = {}
    for path in sorted(path for path in files if path.suffix in (".h", ".cc", ".inc")):
        parts = path.relative_to(ROOT).parts
        source = "src" if parts[0] == "src" else parts[1] if len(parts) > 2 else "operators"
        source = "operators" if source in operators else source
        for name in re.findall(r'^#include "(\w+)/', path.read_text(encoding="utf-8"), re.MULTILINE):
            target = "operators" if name in operators else name
            if name in folders and target != source:
                found.setdefault(source, set()).add(target)
    return found


def _check_names(edges: Edges, known: dict[str, str]) -> None:
    found = set(edges).union(*edges.values())
    if found != set(known):
        raise SystemExit(f"code_map.py names {sorted(known)}, but the code has {sorted(found)}; edit PYTHON or NATIVE")


def _reduce(edges: Edges) -> Edges:
    """Remove arrows that a path of other arrows implies. Raises SystemExit for a circle."""
    reach: dict[str, set[str]] = {}

    def below(name: str, path: tuple[str, ...]) -> set[str]:
        if name in path:
            raise SystemExit(f"packages import each other in a circle: {' -> '.join((*path, name))}")
        if name not in reach:
            reach[name] = set().union(*({one} | below(one, (*path, name)) for one in edges.get(name, ())))
        return reach[name]

    for name in list(edges):
        below(name, ())
    return {
        name: {one for one in ones if not any(one in reach[other] for other in ones if other != one)}
        for name, ones in edges.items()
    }


def _levels(edges: Edges, names: list[str]) -> dict[str, int]:
    """Return the row of each box: one below the lowest package that imports it."""
    importers = {name: [one for one in names if name in edges.get(one, ())] for name in names}

    def depth(name: str) -> int:
        return 1 + max((depth(one) for one in importers[name]), default=-1)

    return {name: depth(name) for name in names}


def _arrange(edges: Edges, names: list[str]) -> Panel:
    """Place the boxes in rows, in an order with few crossings; long arrows pass between boxes."""
    level = _levels(edges, names)
    rows: list[list[tuple[str, ...]]] = [[] for _ in range(max(level.values()) + 1)]
    for name in names:
        rows[level[name]].append((name,))
    chains = []
    for name in names:
        for one in sorted(edges.get(name, ()), key=names.index):
            chain: list[tuple[str, ...]] = [(name,)]
            for row in range(level[name] + 1, level[one]):
                chain.append((name, one, str(row)))
                rows[row].append(chain[-1])
            chains.append([*chain, (one,)])
    near: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for chain in chains:
        for above, under in itertools.pairwise(chain):
            near.setdefault(above, []).append(under)
            near.setdefault(under, []).append(above)
    x: dict[tuple[str, ...], float] = {}

    def spread(row: list[tuple[str, ...]]) -> None:
        widths = [_BOX[0] if len(slot) == 1 else _BEND for slot in row]
        left = -(sum(widths) + _GAP * (len(row) - 1)) / 2
        for slot, width in zip(row, widths, strict=True):
            x[slot] = left + width / 2
            left += width + _GAP

    for row in rows:
        spread(row)
    for sweep in range(24):
        for row in rows if sweep % 2 else reversed(rows):
            middle = {slot: sum(x[one] for one in near.get(slot, [slot])) / len(near.get(slot, [slot])) for slot in row}
            row.sort(key=lambda slot: middle[slot])
            spread(row)
    width = max(max(x.values()) - min(x.values()) + _BOX[0], _BOX[0])
    shift = _BOX[0] / 2 - min(x[slot] for row in rows for slot in row if len(slot) == 1)
    y = {slot: number * _LEVEL + _BOX[1] / 2 for number, row in enumerate(rows) for slot in row}
    at = {slot: (x[slot] + shift, y[slot]) for slot in x}
    boxes = {slot[0]: at[slot] for slot in at if len(slot) == 1}
    arrows = [[at[slot] for slot in chain] for chain in chains]
    return Panel(boxes, arrows, width, (len(rows) - 1) * _LEVEL + _BOX[1])


def _draw(panel: Panel, about: dict[str, str], left: float, top: float, colours: dict[str, str]) -> Iterator[str]:
    for points in panel.arrows:
        moved = [(x + left, y + top) for x, y in points]
        start = (moved[0][0], moved[0][1] + _BOX[1] / 2)
        end = (moved[-1][0], moved[-1][1] - _BOX[1] / 2 - 5)
        path = f"M{start[0]:.0f} {start[1]:.0f}"
        here = start
        stops = [(x, y + side * _BOX[1] / 2) for x, y in moved[1:-1] for side in (-1, 1)]
        for place in [*stops, end]:
            half = (here[1] + place[1]) / 2
            path += f"C{here[0]:.0f} {half:.0f} {place[0]:.0f} {half:.0f} {place[0]:.0f} {place[1]:.0f}"
            here = place
        yield f'<path d="{path}" fill="none" stroke="{colours["line"]}" stroke-width="1.3" marker-end="url(#arrow)"/>'
    for name, (x, y) in panel.boxes.items():
        corner = f'x="{x + left - _BOX[0] / 2:.0f}" y="{y + top - _BOX[1] / 2:.0f}"'
        size = f'width="{_BOX[0]}" height="{_BOX[1]}" rx="4"'
        yield f'<rect {corner} {size} fill="{colours["box"]}" stroke="{colours["edge"]}"/>'
        yield _text(x + left, y + top - 3, name, colours["text"], 12, "600")
        yield _text(x + left, y + top + 11, about[name], colours["quiet"], 10.5)


def _text(x: float, y: float, text: str, colour: str, size: float, weight: str = "400") -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="middle"'
    return f'<text {place} font-size="{size}" font-weight="{weight}" fill="{colour}">{text}</text>'


def draw(scheme: str) -> str:
    """Return the picture as SVG."""
    colours = _COLOURS[scheme]
    parts = []
    left, top, height = 8.0, 34.0, 0.0
    for title, edges, about in (
        ("Python: src/ortolan, graph_passes, models, benchmarks", python_edges(), PYTHON),
        ("C++: ops, src", native_edges(), NATIVE),
    ):
        _check_names(edges, about)
        panel = _arrange(_reduce(edges), list(about))
        parts.append(_text(left + panel.width / 2, 18, title, colours["text"], 13, "600"))
        parts += _draw(panel, about, left, top, colours)
        left += panel.width + 36
        height = max(height, panel.height)
    size = f"{left - 28:.0f} {height + top + 8:.0f}"
    arrow = f'<path d="M0 0L8 4L0 8z" fill="{colours["line"]}"/>'
    marker = f'<marker id="arrow" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">{arrow}</marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif">'
    return "\n".join([head, f"<defs>{marker}</defs>", *parts, "</svg>\n"])


def main(check: bool) -> int:
    """Write or check both pictures; return the exit status."""
    for scheme in _COLOURS:
        path = PICTURES / f"code-map-{scheme}.svg"
        picture = draw(scheme)
        if not check:
            path.write_text(picture, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != picture:
            print(f"{path.relative_to(ROOT)} is not current; run: python .ci/code_map.py")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
