"""Models of the packages that manifest.toml pins, stored in the cache of ortolan.models."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

from ortolan.models.fetch import fetch_entry
from ortolan.models.manifest import load_manifest, parse_entry

MANIFEST = Path(__file__).with_name("manifest.toml")


def packaged_models(progress: Callable[[str], None]) -> list[Path]:
    """Fetch missing models, and return the paths of all model files."""
    tables = tomllib.loads(MANIFEST.read_text(encoding="utf-8"))
    shared = tables.pop("also")["models"]  # names in the manifest of ortolan.models
    entries = [parse_entry(name, table) for name, table in tables.items()]
    entries += [load_manifest()[name] for name in shared]
    found = []
    for entry in entries:
        folder = fetch_entry(entry, None, progress)
        found += [folder / file.name for file in entry.files if file.name.endswith((".onnx", ".gguf"))]
    return found
