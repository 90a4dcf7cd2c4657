"""Find rows that are older than the code that they measure.

Each row of Ortolan has a digest of the native code and the engine that its section runs. Python code that converts
models is not part of it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .result import PeersResult, Row
from .verdict import DECODERS, ENCODERS, LAYERS, SERVING, SIZES, SPARSE_ENCODERS

MARK = "†"
_ROOT = Path(__file__).resolve().parents[2]
_SUFFIXES = (".cc", ".h", ".inc", ".py")
_LAYERS = (
    *("ops/formats", "ops/host", "ops/isa", "ops/simd", "ops/matmul", "ops/epilogue"),
    *("ops/sparse_amx_matmul", "ops/w4a8_matmul", "ops/w8a8_matmul"),
)
_ENCODERS = (*_LAYERS, "ops/attention", "ops/add_layer_norm", "ops/pack_tokens", "ops/unpack_tokens", "ops/vnni_spmm")
_DECODERS = (*_LAYERS, "ops/attention", "ops/nomad_attention")
SOURCES: Mapping[str, tuple[str, ...]] = {
    ENCODERS: _ENCODERS,
    SPARSE_ENCODERS: _ENCODERS,
    DECODERS: _DECODERS,
    LAYERS: _LAYERS,
    SERVING: (*_DECODERS, "src/ortolan/engine"),
    SIZES: (*_DECODERS, "src/ortolan/engine"),
}


@functools.cache
def digest_of(section: str) -> str:
    """Return a digest of the files that the section measures, in this checkout."""
    found = hashlib.sha256()
    for folder in SOURCES[section]:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                found.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def is_stale(row: Row) -> bool:
    """Return whether a row of Ortolan measured other code than that of this checkout."""
    return row.ours and row.code != digest_of(row.section)


def timed(result: PeersResult) -> dict[tuple[str, str], frozenset[int]]:
    """Return the numbers of threads that each (section, model) was timed with. Groups with stale rows are left out."""
    stale = {(row.section, row.model) for row in result.rows if is_stale(row)}
    return {group: threads for group, threads in result.timed().items() if group not in stale}


def marked(result: PeersResult) -> PeersResult:
    """Return the result with a mark after the names of stale rows."""
    return replace(
        result, rows=[replace(row, name=f"{row.name}{MARK}") if is_stale(row) else row for row in result.rows]
    )
