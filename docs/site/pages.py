"""A hook of mkdocs: pages of the site whose text stands elsewhere in the repository, read where it is.

Links between all of these files, as they work in the repository, lead to the pages of the site. A link to a file that
is no page becomes its path.
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
ROOMS = (
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
    "matmul",
)
# The page's place in the site -> the file in the repository.
ELSEWHERE = {
    "index.md": "README.md",
    **{f"operators/{room}.md": f"ops/{room}/README.md" for room in (*ROOMS, "epilogue", "opencl", "provider")},
    "operators/auto.md": "graph_passes/auto/README.md",
    "operators/pruners.md": "graph_passes/weights/pruners/README.md",
    "operators/train.md": "src/ortolan/train/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_PAGES = {path: page for page, path in ELSEWHERE.items()}
_LINK = re.compile(r"^```.*?^```$|(!?)\[([^\]]*)\]\(([^)\s]+)\)", re.MULTILINE | re.DOTALL)  # or a block of code
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = page.file.src_uri
    path = ELSEWHERE.get(place, f"docs/{place}")
    text = rewrite_links(markdown, path)
    # In prose "[K][64]" is two dimensions, and no link by reference. Every second part is code.
    parts = _CODE.split(text)
    return "".join(part if number % 2 else part.replace("][", "]\\[") for number, part in enumerate(parts))


def rewrite_links(text: str, path: str) -> str:
    """path: the file that the text stands in. Raises PluginError for a link to what is not there."""

    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if target is None:
            return match[0]
        address, _, anchor = target.partition("#")
        if not address or "://" in address or address.startswith("mailto:"):
            return match[0]
        file = os.path.normpath(PurePosixPath(path).parent / address)
        if not (ROOT / file).exists():
            raise PluginError(f"{path} links to {target}, which is not there")
        page = _page_of(file)
        if page is None:
            return label if picture or label.strip("`") == file else f"{label} (`{file}`)"
        here = PurePosixPath(_page_of(path) or path).parent
        return f"{picture}[{label}]({os.path.relpath(page, here)}{'#' + anchor if anchor else ''})"

    return _LINK.sub(replace, text)


def _page_of(file: str) -> str | None:
    """The place in the site of a file of the repository, or None for a file that is not in it."""
    if file in _PAGES:
        return _PAGES[file]
    if (ROOT / file).is_dir() and f"{file}/README.md" in _PAGES:
        return _PAGES[f"{file}/README.md"]
    return file.removeprefix("docs/") if file.startswith("docs/") else None
