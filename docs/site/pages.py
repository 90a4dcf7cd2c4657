"""A mkdocs hook: adds pages whose text is elsewhere in the repository, and fills in tables made from code.

Links in the text are written for the repository. The hook turns them into links to pages of the site; links to files
that are not on the site become plain paths.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OPERATORS = (
    "sparse_amx_matmul",
    "w4a8_matmul",
    "w8a8_matmul",
    "vnni_spmm",
    "nomad_attention",
    "masked_matmul",
    "lut_post_op",
    "pack_tokens",
    "unpack_tokens",
    "add_layer_norm",
    "linear_attention",
    "moe",
    "matmul",
    "epilogue",
    "opencl",
    "provider",
)
# Maps a page of the site to the repository file that contains its text.
ELSEWHERE = {
    "index.md": "README.md",
    **{f"operators/{name}.md": f"ops/{name}/README.md" for name in OPERATORS},
    "operators/auto.md": "graph_passes/auto/README.md",
    "operators/pruners.md": "graph_passes/weights/pruners/README.md",
    "operators/train.md": "src/ortolan/train/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
OPTIONS_MARKER = re.compile(r"<!-- table: ortolan\.OptimizeOptions -->.*?<!-- end of table -->", re.DOTALL)
_PAGES = {path: page for page, path in ELSEWHERE.items()}
_LINK = re.compile(r"^```.*?^```$|(!?)\[([^\]]*)\]\(([^)\s]+)\)", re.MULTILINE | re.DOTALL)  # or a code block
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are stored elsewhere."""
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in tables and rewrite links."""
    place = page.file.src_uri
    path = ELSEWHERE.get(place, f"docs/{place}")
    text = rewrite_links(OPTIONS_MARKER.sub(lambda _: options_table(), markdown), path)
    # In prose, "[K][64]" is a shape and not a reference link. Every second part is a code span or block.
    parts = _CODE.split(text)
    return "".join(part if number % 2 else part.replace("][", "]\\[") for number, part in enumerate(parts))


def options_table() -> str:
    """Return the options of optimize_onnx as a Markdown table."""
    from ortolan.optimize_options import rows

    lines = ["| option | values | default | meaning |", "| --- | --- | --- | --- |"]
    for row in rows():
        name = f'<code class="nobreak">{row.name}</code>'
        # Escape pipes only in the text: in code spans they do not end a cell.
        lines.append(f"| {name} | `{row.type}` | `{row.default}` | {row.help.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def rewrite_links(text: str, path: str) -> str:
    """Rewrite the links of the file `path`, relative to the repository's root, as links of the site.

    Raises:
        PluginError: A link leads to a file that does not exist.
    """

    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if target is None:
            return match[0]
        address, _, anchor = target.partition("#")
        if not address or "://" in address or address.startswith("mailto:"):
            return match[0]
        file = os.path.normpath(PurePosixPath(path).parent / address)
        if not (ROOT / file).exists():
            raise PluginError(f"{path}: link to {target}, which does not exist")
        page = _page_of(file)
        if page is None:
            return label if picture or label.strip("`") == file else f"{label} (`{file}`)"
        here = PurePosixPath(_page_of(path) or path).parent
        return f"{picture}[{label}]({os.path.relpath(page, here)}{'#' + anchor if anchor else ''})"

    return _LINK.sub(replace, text)


def _page_of(file: str) -> str | None:
    """Return the page of the site for a file of the repository, or None if the site does not contain it."""
    if file in _PAGES:
        return _PAGES[file]
    if (ROOT / file).is_dir() and f"{file}/README.md" in _PAGES:
        return _PAGES[f"{file}/README.md"]
    return file.removeprefix("docs/") if file.startswith("docs/") else None
