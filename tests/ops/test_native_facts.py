"""Test that .ci/native_facts.py finds C++ functions and their lengths."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "native_facts.py"

SOURCE = """#define OPEN(x) \\
  if (x) {
namespace a {
enum class E { kOne };
constexpr int kTable[] = {1, 2};
struct S : Base<int(float)> {
  S() : a(1) {}  // {
  int Get(int (*f)(int)) const {
    const char* brace = "{";
    auto g = [] {
      return 1;
    };
    return g();
  }
};
template <typename T>
static void Long(T a,
                 int b) {
  if (a) {
    Call([&] { b += 1; });
  }
}
}  // namespace a
"""


@pytest.fixture
def facts() -> ModuleType:
    if not SCRIPT.exists():
        pytest.skip("no checkout here")
    spec = importlib.util.spec_from_file_location("native_facts", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions(facts: ModuleType) -> None:
    assert list(facts.functions(SOURCE)) == [(7, 1), (8, 7), (16, 7)]


def test_a_function_that_is_too_long_fails(
    facts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ops").mkdir()
    for lines, expected in ((facts.MAX_LINES, 0), (facts.MAX_LINES + 1, 1)):
        (tmp_path / "ops" / "a.cc").write_text("void F() {\n" + "  G();\n" * (lines - 2) + "}\n")
        assert facts.main() == expected
    assert f"ops/a.cc:1: function has {facts.MAX_LINES + 1} lines" in capsys.readouterr().out
