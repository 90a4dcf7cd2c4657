"""Where what is fetched or measured once is kept: models, and times of layers on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_cache_dir() -> Path:
    """`$ORTOLAN_CACHE` where set, else `ortolan` in the platform's cache folder."""
    if chosen := os.environ.get("ORTOLAN_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "ortolan"
