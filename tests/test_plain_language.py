"""Tests of the check for plain language, .ci/plain_language.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
RULES = {
    "phrase": [{"pattern": r"\bfrobs on\b", "write": "depends on"}],
    "docstring": [{"pattern": "^of\\b", "write": "a verb"}],
}
pytestmark = pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="needs a source checkout")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_language", ROOT / ".ci" / "plain_language.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "source", "lines"),
    [
        ("a.py", '"""Return the size."""\nx = 1  # it frobs\n# on the CPU\n', [2]),
        ("a.py", 'def f():\n    """Of a model, the size."""\n', [2]),
        ("a.py", 'x = f"the size of {y} frobs on the CPU"\n', [1]),
        ("a.py", 'frobs_on = "frobs-on"\n', []),
        ("a.cc", "int a;  // plain\n// The size frobs\n// on the CPU.\n", [2]),
        ("a.h", 'Fail("the size frobs "\n     "on the CPU");\n', [1]),
        ("a.md", "Plain.\n\nThe size\nfrobs on the CPU.\n\n```\nit frobs on\n```\n`frobs on`\n", [4]),
        ("a.toml", "# The size\n# frobs on the CPU.\nkey = 1\n", [2]),
        ("a.bin", "frobs on\n", []),
    ],
)
def test_phrases_are_found_by_line(check: ModuleType, tmp_path: Path, name: str, source: str, lines: list[int]) -> None:
    path = tmp_path / name
    path.write_text(source, encoding="utf-8")
    found = list(check.findings(path, check.make_rules(RULES)))
    assert [int(line.removeprefix(f"{path}:").split(":")[0]) for line in found] == lines
    assert all("write: " in line for line in found)


def test_binary_files_are_skipped(check: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"\xff\xfe frobs on")
    assert list(check.texts(path)) == []
