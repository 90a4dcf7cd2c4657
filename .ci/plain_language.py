"""Check that comments, docstrings, string literals and Markdown are written in plain English.

Look for the phrases of plain_language.toml in all files that git knows, print each as `file:line: found; write: …`, and
exit with 1 if there are any. With --count, print only the number of findings in each folder. With arguments, check
only the files whose paths start with one of them.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RULES = Path(__file__).resolve().with_suffix(".toml")
PYTHON = {".py", ".pyi"}
NATIVE = {".h", ".cc", ".inc", ".cl", ".in"}
HASH = {".toml", ".cmake", ".txt", ".yml"}  # comments start with #
_NATIVE_TEXT = re.compile(
    r'//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"(?:\s*"(?:\\.|[^"\\\n])*")*', re.DOTALL
)
_HASH_TEXT = re.compile(r"(?:^|(?<=\s))#[^\n]*(?:\n[ \t]*#[^\n]*)*")
_CODE_BLOCK = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)
# Comment marks at the start of lines, and quotes between adjacent string literals.
_MARKS = re.compile(r'^[ \t]*(?://+|#+|\*)|"\s*"', re.MULTILINE)


class Text(NamedTuple):
    """A piece of prose and the line on which it starts."""

    line: int
    text: str
    docstring: bool = False


class Rule(NamedTuple):
    """A phrase to avoid, and its replacement."""

    pattern: re.Pattern[str]
    write: str


def make_rules(tables: dict[str, list[dict[str, str]]]) -> tuple[list[Rule], list[Rule]]:
    """Return the rules for all prose, and the rules for the start of docstrings.

    A space in a pattern also matches a line break with the indentation of the next line.
    """
    phrases, starts = (
        [Rule(re.compile(one["pattern"].replace(" ", r"\s+"), re.IGNORECASE), one["write"]) for one in tables[kind]]
        for kind in ("phrase", "docstring")
    )
    return phrases, starts


def _python(source: str) -> Iterator[Text]:
    comment: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != last + 1:
                yield Text(start, "\n".join(comment))
                comment = []
            if not comment:
                start = token.start[0]
            comment.append(token.string.lstrip("# "))
            last = token.start[0]
    if comment:
        yield Text(start, "\n".join(comment))
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.add(id(first.value))
                yield Text(first.lineno, first.value.value, True)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and " " in node.value
        ):
            yield Text(node.lineno, node.value)


def _matches(pattern: re.Pattern[str], source: str) -> Iterator[Text]:
    for found in pattern.finditer(source):
        text = found[0].strip('"') if found[0].startswith('"') else found[0]
        yield Text(source.count("\n", 0, found.start()) + 1, _MARKS.sub("", text))


def _markdown(source: str) -> Iterator[Text]:
    prose = _CODE_BLOCK.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)
    line = 1
    for paragraph in re.split(r"(\n[ \t]*\n)", prose):
        yield Text(line + len(paragraph) - len(paragraph.lstrip("\n")), paragraph.strip("\n"))
        line += paragraph.count("\n")


def texts(path: Path) -> Iterator[Text]:
    """Yield all prose of one file."""
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # not a text
        return
    if path.suffix in PYTHON:
        yield from _python(source)
    elif path.suffix == ".md" or path.suffix == ".jinja":
        yield from _markdown(source)
    elif path.suffix in NATIVE:
        yield from _matches(_NATIVE_TEXT, source)
    elif path.suffix in HASH or path.name in ("Makefile", "run", "extra", "aarch64", "pocl", "wheels"):
        yield from _matches(_HASH_TEXT, source)


def findings(path: Path, rules: tuple[list[Rule], list[Rule]]) -> Iterator[str]:
    """Yield a line for each phrase of one file that the rules refuse."""
    phrases, starts = rules
    for text in texts(path):
        for rule in [*phrases, *(starts if text.docstring else [])]:
            for found in rule.pattern.finditer(text.text):
                line = text.line + text.text.count("\n", 0, found.start())
                yield f"{path}:{line}: {' '.join(found[0].split())!r}; write: {rule.write}"


def main(arguments: list[str]) -> int:
    """Check the files that git knows, or the given ones."""
    counting = "--count" in arguments
    wanted = tuple(one for one in arguments if not one.startswith("--"))
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    rules = make_rules(tomllib.loads(RULES.read_text(encoding="utf-8")))
    counts: Counter[str] = Counter()
    for name in sorted(filter(None, names)):
        path = Path(name)
        if (
            name == RULES.relative_to(Path.cwd()).as_posix()
            or not path.is_file()
            or (wanted and not name.startswith(wanted))
        ):
            continue
        for line in findings(path, rules):
            counts["/".join(path.parts[:2]) if len(path.parts) > 1 else name] += 1
            if not counting:
                print(line)
    if counting:
        for folder, count in sorted(counts.items()):
            print(f"{count:6} {folder}")
    print(f"{counts.total()} phrases to rewrite", file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
