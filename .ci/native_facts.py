"""Print the size of the native code, its longest file and its longest function.

Exits with 1 if a function is longer than MAX_LINES. Run it in the repository's root.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("ops", "src")
MAX_LINES = 80
# Matches literals and comments, which are removed except for their line breaks.
_NO_CODE = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\\n?)*", re.MULTILINE)
_SCOPE = re.compile(r"\b(namespace|class|struct|union|enum)\b|\bextern\s*$")


def files() -> list[Path]:
    """Return all headers, sources and tables of the native code."""
    return sorted(path for folder in FOLDERS for kind in ("h", "cc", "inc") for path in Path(folder).rglob(f"*.{kind}"))


def functions(text: str) -> Iterator[tuple[int, int]]:
    """Yield the first line and the number of lines of each top-level function, including its signature."""
    code = _NO_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    code = _DIRECTIVE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), code)
    depth_of_function: int | None = None
    depth, first_line, head_begin = 0, 0, 0
    for position, letter in enumerate(code):
        if letter == "{":
            head = code[head_begin:position]
            if depth_of_function is None and "(" in head and not _SCOPE.search(head.split("(")[0]):
                depth_of_function = depth
                first_line = code.count("\n", 0, head_begin + len(head) - len(head.lstrip())) + 1
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == depth_of_function:
                depth_of_function = None
                yield first_line, code.count("\n", 0, position) + 2 - first_line
        if letter in ";{}" and depth_of_function is None:
            head_begin = position + 1


def main() -> int:
    """Print the figures; return 1 if a function is too long."""
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    lengths = {path: text.count("\n") for path, text in texts.items()}
    longest = max(lengths, key=lambda path: lengths[path])
    found = [(lines, path, first) for path, text in texts.items() for first, lines in functions(text)]
    testing = sum(lines for path, lines in lengths.items() if path.is_relative_to("src/testing"))
    print(f"lines of native code       {sum(lengths.values())}, {testing} of them in src/testing")
    print(f"files                      {len(texts)}, the longest: {longest}, {lengths[longest]} lines")
    lines, path, first = max(found)
    print(f"functions                  {len(found)}, the longest: {path}:{first}, {lines} lines")
    too_long = sorted((found for found in found if found[0] > MAX_LINES), reverse=True)
    for lines, path, first in too_long:
        print(f"{path}:{first}: function has {lines} lines, at most {MAX_LINES} are allowed")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
