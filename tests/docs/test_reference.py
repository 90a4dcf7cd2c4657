"""The API reference lists exactly the public names."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import ortolan

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
# Modules that users import in addition to `ortolan`.
MODULES = (
    "ortolan.generate",
    "ortolan.train",
    "ortolan.optimum",
    "ortolan.transformers",
    "ortolan.server",
    "ortolan.engine",
    "ortolan.triton",
)


def listed() -> list[tuple[str, str]]:
    """Return the module and name of each entry in the reference."""
    entries = re.findall(r"^::: ([\w.]+)\.(\w+)$", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) == len(set(entries)) > 40
    return entries


def test_the_reference_lists_the_public_names() -> None:
    names = {name for module, name in listed() if not module.startswith(MODULES)}
    assert names == set(ortolan.__all__) - {"__version__"}


def test_public_names_can_be_imported() -> None:
    assert set(ortolan.__all__) <= set(dir(ortolan))
    for module, name in listed():
        if not module.startswith(MODULES):
            assert getattr(ortolan, name) is getattr(import_module(module), name)
