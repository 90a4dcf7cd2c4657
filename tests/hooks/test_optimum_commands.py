"""optimum-cli imports Ortolan's command module at each start, which must never raise an error."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import pytest

MODULE = "optimum.commands.register.register_ortolan"


def commands() -> list[object]:
    for name in (MODULE, "ortolan.optimum_cli"):
        sys.modules.pop(name, None)
    try:
        return list(importlib.import_module(MODULE).REGISTER_COMMANDS)
    finally:
        for name in (MODULE, "ortolan.optimum_cli"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("absent", "expected"), [("optimum.commands.base", 0), ("optimum.commands.export.onnx", 1), ("nothing", 2)]
)
def test_registered_commands(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], absent: str, expected: int
) -> None:
    if absent != "optimum.commands.base":
        pytest.importorskip("optimum.commands.base", reason="needs optimum")
    if absent == "nothing":
        pytest.importorskip("optimum.commands.export.onnx", reason="needs optimum-onnx")
    monkeypatch.setitem(sys.modules, absent, None)  # importing this name now raises ImportError
    assert len(commands()) == expected
    assert capfd.readouterr().err == ""


class Broken(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"{self.__name__} is broken")


@pytest.mark.parametrize(("broken", "expected"), [("optimum.commands.base", 0), ("optimum.commands.export.onnx", 1)])
def test_a_broken_optimum(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], broken: str, expected: int
) -> None:
    if expected:
        pytest.importorskip("optimum.commands.base", reason="needs optimum")
    else:
        # Create the package without running its __init__.
        package = types.ModuleType("optimum.commands")
        spec = importlib.util.find_spec("optimum.commands")
        assert spec is not None
        package.__path__ = list(spec.submodule_search_locations or ())
        monkeypatch.setitem(sys.modules, "optimum.commands", package)
    monkeypatch.setitem(sys.modules, broken, Broken(broken))
    assert len(commands()) == expected
    assert f"RuntimeError: {broken} is broken" in capfd.readouterr().err


def test_a_missing_requirement_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """If a module of Ortolan cannot be imported, the message names it."""
    monkeypatch.setitem(sys.modules, "ortolan.optimum_cli", None)
    module = importlib.import_module  # imported here, because `commands` would hide the error
    sys.modules.pop(MODULE, None)
    try:
        assert module(MODULE).REGISTER_COMMANDS == []
    finally:
        sys.modules.pop(MODULE, None)
    assert "optimum-cli has no Ortolan commands: ModuleNotFoundError" in capfd.readouterr().err


def test_nothing_heavy_is_imported() -> None:
    import subprocess

    pytest.importorskip("optimum.commands.base", reason="needs optimum")
    code = (
        f"import sys, {MODULE}\n"
        "print([name for name in ('onnx', 'onnxruntime', 'onnx_ir', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
