"""The list of real models (manifest.toml) as dataclasses."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import OrtolanError

MANIFEST_PATH = Path(__file__).with_name("manifest.toml")


class ManifestError(OrtolanError):
    """An unknown model name, or a malformed manifest entry."""


@dataclass(frozen=True)
class ManifestFile:
    """One file to extract from an archive: `size` bytes of `member`, starting at `offset`, are written as `name`.

    Files of one name are parts of one file and joined in manifest order.
    """

    name: str
    member: str
    size: int
    offset: int = 0

    def __post_init__(self) -> None:
        # The name becomes a path, which must not leave the model's folder.
        if self.name in ("", ".", "..") or "/" in self.name or "\\" in self.name or ":" in self.name:
            raise ManifestError(f"file name {self.name!r} is not a plain file name; give it no folder")
        member = PurePosixPath(self.member)
        if member.is_absolute() or ".." in member.parts or "\\" in self.member:
            raise ManifestError(f"member {self.member!r} leads out of its archive; give a path relative to its root")
        if self.size <= 0 or self.offset < 0:
            raise ManifestError(
                f"file {self.name!r} has size {self.size} and offset {self.offset}; expected size > 0 <= offset"
            )


@dataclass(frozen=True)
class Package:
    """One published archive: `archive` is the file name that the package manager writes."""

    package: str
    version: str
    archive: str
    sha256: str
    files: tuple[ManifestFile, ...]


@dataclass(frozen=True)
class ModelEntry:
    """One model: its source, licence (SPDX) and architecture."""

    name: str
    source: str
    architecture: str
    licence: str
    packages: tuple[Package, ...]

    @property
    def files(self) -> tuple[ManifestFile, ...]:
        """The files of all packages, in manifest order."""
        return tuple(file for package in self.packages for file in package.files)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each extracted file, by name."""
        found: dict[str, int] = {}
        for file in self.files:
            found[file.name] = found.get(file.name, 0) + file.size
        return found

    @property
    def digest(self) -> str:
        """A digest of 12 hex digits over all archives and files to extract."""
        return hashlib.sha256(repr(self.packages).encode()).hexdigest()[:12]


def parse_entry(name: str, table: dict[str, Any]) -> ModelEntry:
    """Convert one table of the manifest to a ModelEntry.

    Raises:
        ManifestError: A key is missing, unknown or unsafe.
    """
    try:
        packages = tuple(
            Package(**{**package, "files": tuple(ManifestFile(**file) for file in package["files"])})
            for package in table["packages"]
        )
        entry = ModelEntry(**{**table, "name": name, "packages": packages})
    except (KeyError, TypeError) as error:
        raise ManifestError(f"manifest entry {name!r} is not well formed: {error}") from error
    if entry.source not in ("pypi", "npm"):
        raise ManifestError(f"manifest entry {name!r} has source {entry.source!r}; expected 'pypi' or 'npm'")
    return entry


@cache
def load_manifest() -> dict[str, ModelEntry]:
    """Return all entries of manifest.toml by model name."""
    tables = tomllib.loads(MANIFEST_PATH.read_text(encoding="utf-8"))
    return {name: parse_entry(name, table) for name, table in tables.items()}


def find_entry(name: str) -> ModelEntry:
    """Return the entry with this name.

    Raises:
        ManifestError: The name is unknown; the message lists the known names.
    """
    entries = load_manifest()
    if name not in entries:
        raise ManifestError(f"unknown model {name!r}; known models: {', '.join(sorted(entries))}")
    return entries[name]
