"""Find ONNX Runtime's C headers."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def headers() -> Path | None:
    """Return the folder of ONNX Runtime's C headers of 1.29, searched as in ops/ort/ort_headers.cmake."""
    named = os.environ.get("ORT_INCLUDE_DIR")
    built = [path.parent for path in ROOT.glob("build/**/ort_headers/onnxruntime_ep_c_api.h")]
    told = [Path(line) for cache in ROOT.glob("build/**/CMakeCache.txt") for line in cached(cache)]
    folders = [*([Path(named)] if named else []), *told, ROOT.parent / "shared" / "ort-1.29", *built]
    return next((folder for folder in folders if (folder / "onnxruntime_ep_c_api.h").is_file()), None)


def cached(cache: Path) -> list[str]:
    return re.findall(r"^ORT_INCLUDE_DIR:\w+=(.+)$", cache.read_text(errors="replace"), re.MULTILINE)
